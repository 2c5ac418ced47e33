#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/export.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "rewriter/error.h"
#include "rewriter/file/archive.h"
#include "rewriter/file/model_file.h"
#include "rewriter/file/new_file.h"
#include "rewriter/file/pickle.h"

using namespace tsmem;
using torch::jit::Module;
namespace fs = std::filesystem;

namespace {

struct ModelFileTest : testing::Test {
  fs::path folder = fs::temp_directory_path() / ("tsmem-test-" + std::to_string(getpid()));
  void SetUp() override { fs::create_directories(folder); }
  void TearDown() override { fs::remove_all(folder); }

  std::string at(const std::string& name) { return (folder / name).string(); }
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(at(name), std::ios::binary) << text;
    return at(name);
  }
  size_t files() {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
  }
};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Module small() {
  Module m("Net");
  m.register_parameter("weight", at::arange(6, at::kFloat).view({2, 3}), false);
  m.define("def forward(self, x):\n  return x + self.weight\n");
  return m;
}

std::optional<ErrorKind> kind_of(const std::function<void()>& action, std::string* text = nullptr) {
  try {
    action();
  } catch (const Error& e) {
    if (text) *text = e.what();
    return e.kind;
  }
  return {};
}

}  // namespace

TEST_F(ModelFileTest, RoundTripKeepsExtraFiles) {
  std::map<std::string, std::string> extra = {
      {"labels.txt", "cat"}, {"deep/bytes", std::string("\0\xff\0", 3)}, {"empty", ""}};
  save_model(small(), extra, at("m.pt"), false);
  auto loaded = load_model(at("m.pt"));
  EXPECT_EQ(loaded.extra_files, extra);
  EXPECT_TRUE(at::equal(loaded.module.attr("weight").toTensor(), small().attr("weight").toTensor()));
  EXPECT_EQ(files(), 1u);
}

TEST_F(ModelFileTest, MetaHasShapesAlone) {
  save_model(small(), {}, at("m.pt"), false);
  auto weight = load_model(at("m.pt"), "meta").module.attr("weight").toTensor();
  EXPECT_TRUE(weight.is_meta());
  EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{2, 3}));
}

TEST_F(ModelFileTest, ExistingFileNeedsForce) {
  write("m.pt", "precious");
  EXPECT_EQ(kind_of([&] { save_model(small(), {}, at("m.pt"), false); }), ErrorKind::request);
  EXPECT_TRUE(read(at("m.pt")) == "precious");
  save_model(small(), {}, at("m.pt"), true);
  EXPECT_NO_THROW(load_model(at("m.pt")));
  EXPECT_EQ(files(), 1u);
}

TEST_F(ModelFileTest, FileThatAppearsMeanwhileIsKept) {
  PendingModel pending(small(), {}, at("m.pt"), false);
  EXPECT_NO_THROW(load_model(pending.temporary()));
  write("m.pt", "precious");
  EXPECT_EQ(kind_of([&] { pending.commit(); }), ErrorKind::request);
  EXPECT_TRUE(read(at("m.pt")) == "precious");
}

TEST_F(ModelFileTest, WithoutCommitNothingIsLeft) {
  { PendingModel pending(small(), {}, at("m.pt"), false); }
  EXPECT_EQ(files(), 0u);
}

TEST_F(ModelFileTest, TemporaryFileGoesOnASignal) {
  PendingModel pending(small(), {}, at("m.pt"), false);
  EXPECT_EQ(files(), 1u);
  remove_temporary_file();
  EXPECT_EQ(files(), 0u);
}

TEST_F(ModelFileTest, FullDisk) {
  auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old;
  getrlimit(RLIMIT_FSIZE, &old);
  write("m.pt", "precious");
  for (rlim_t limit : {1u, 100u, 1000u, 1500u}) {
    rlimit low = {limit, old.rlim_max};
    setrlimit(RLIMIT_FSIZE, &low);
    std::string text;
    auto code = kind_of([&] { save_model(small(), {}, at("m.pt"), true); }, &text);
    auto code_of_text = kind_of([&] { save_text(std::string(5000, 'x'), at("m.pt")); });
    setrlimit(RLIMIT_FSIZE, &old);
    EXPECT_EQ(code, ErrorKind::input) << limit;
    EXPECT_EQ(code_of_text, ErrorKind::input) << limit;
    EXPECT_NE(text.find("Can't write"), std::string::npos) << text;
    EXPECT_TRUE(read(at("m.pt")) == "precious");
    EXPECT_EQ(files(), 1u);
  }
  std::signal(SIGXFSZ, before);
}

TEST_F(ModelFileTest, SameFileThroughLinks) {
  write("a", "x");
  write("b", "x");
  fs::create_symlink("a", at("link"));
  fs::create_hard_link(at("a"), at("hard"));
  EXPECT_TRUE(same_file(at("a"), at("a")) && same_file(at("a"), at("link")) && same_file(at("hard"), at("link")));
  EXPECT_FALSE(same_file(at("a"), at("b")) || same_file(at("a"), at("nowhere")));
}

// Every cut and every single wrong byte in the directory of a good file is refused, or loads: nothing else.
TEST_F(ModelFileTest, BrokenArchives) {
  save_model(small(), {{"labels.txt", "cat"}}, at("m.pt"), false);
  auto good = read(at("m.pt"));
  for (size_t size = 0; size < good.size(); size += 1 + good.size() / 200)
    EXPECT_EQ(kind_of([&] { load_model(write("bad.pt", good.substr(0, size))); }), ErrorKind::input) << size;
  size_t refused = 0;
  for (size_t i = good.find("PK\x01\x02"); i < good.size(); ++i) {
    auto bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x81);
    auto code = kind_of([&] { read_archive(write("bad.pt", bad)); });
    EXPECT_TRUE(!code || code == ErrorKind::input);
    refused += code == ErrorKind::input;
  }
  EXPECT_GT(refused, 0u);
}

namespace {

std::string fault_of(const std::string& pickle) { return pickle_fault(pickle, {}); }

}  // namespace

TEST(PickleFault, AcceptsWhatIsWhole) {
  EXPECT_EQ(fault_of("\x80\x02)."), "");
  EXPECT_EQ(fault_of("\x80\x02(K\x01K\x02tq" + std::string(1, '\0') + "."), "");
  EXPECT_EQ(fault_of("\x80\x02"
                     "ccollections\nOrderedDict\n)R."),
            "");
  EXPECT_EQ(fault_of("\x80\x02]q\x01(K\x01K\x02"
                     "e."),
            "");
}

TEST(PickleFault, RefusesWhatCannotBe) {
  EXPECT_NE(fault_of(""), "");
  EXPECT_NE(fault_of("\x80\x02)"), "");        // no end
  EXPECT_NE(fault_of("\x80\x02\x86."), "");    // two of an empty stack
  EXPECT_NE(fault_of("\x80\x02t."), "");       // no mark
  EXPECT_NE(fault_of("\x80\x02)(\x85."), "");  // below the mark
  EXPECT_NE(fault_of("\x80\x02X\xff\xff\xff\x7f"
                     "abc."),
            "");                                           // a string longer than the file
  EXPECT_NE(fault_of("\x80\x02)r\xff\xff\xff\x7f."), "");  // a memo of 2^31 entries
  EXPECT_NE(fault_of("\x80\x02"
                     "ccollections\n"),
            "");  // half a name
}

TEST(Sentence, LeavesTracesOut) {
  EXPECT_EQ(sentence(std::runtime_error("one\ntwo")), "one");
  EXPECT_EQ(sentence(std::runtime_error("\nUnknown builtin op: foo::bar.\nCould not find")),
            "Unknown builtin op: foo::bar.");
  EXPECT_EQ(sentence(std::runtime_error(
                "Traceback of TorchScript (most recent call last):\n  File\nRuntimeError: too few channels\n")),
            "too few channels");
  EXPECT_EQ(sentence(std::bad_alloc()), "out of memory");
  EXPECT_FALSE(sentence(std::runtime_error("")).empty());
  try {
    TORCH_CHECK(false, "wrong shape");
  } catch (const std::exception& e) {
    EXPECT_EQ(sentence(e), "wrong shape");
  }
}
