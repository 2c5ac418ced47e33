#include "rewriter/error.h"

#include <c10/util/Exception.h>

#include <new>

#include "rewriter/text.h"

namespace tsmem {
namespace {

void cut_at(std::string_view& text, std::string_view mark) { text = text.substr(0, text.find(mark)); }

}  // namespace

std::string sentence(const std::exception& e) {
  if (dynamic_cast<const std::bad_alloc*>(&e)) return "out of memory";
  auto error = dynamic_cast<const c10::Error*>(&e);
  std::string_view text = error ? error->what_without_backtrace() : e.what();
  cut_at(text, "\nException raised from ");
  // The interpreter puts its traceback first and what went wrong last, as "RuntimeError: ...".
  if (text.find("Traceback of TorchScript") != text.npos) {
    text = strip(text);
    auto at = text.rfind("Error: ");
    if (at != text.npos) text = text.substr(at + 7);
  }
  for (auto mark : {" (Could this error message be improved?", "  (Could this error message be improved?",
                    ". This is an internal miniz error"})
    cut_at(text, mark);
  text = strip(text);
  cut_at(text, "\n");
  text = strip(text);
  return text.empty() ? std::string("an error without a message") : std::string(text);
}

void on_users_values(const std::string& what, const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& e) {
    if (std::string_view(e.what()).find("can't allocate memory") != std::string_view::npos) throw;
    throw Error(ErrorKind::input, what + ": " + sentence(e));
  }
}

}  // namespace tsmem
