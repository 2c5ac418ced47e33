// The names of what rewriting adds to a module, methods and attributes. No model may have names of its own that begin
// so.
#pragma once
#include <ATen/core/jit_type.h>

#include <string>
#include <string_view>
#include <vector>

namespace tsmem {

namespace added_names {
inline const std::string kPrefix = "_tsmem_";               // of all of them
inline const std::string kOriginal = "_tsmem_original_";    // and a method's name: as it was
inline const std::string kAmp = "_tsmem_amp_";              // and a method's name: its body, which runs under autocast
inline const std::string kRecompute = "_tsmem_recompute_";  // and a number: a site's attribute
}  // namespace added_names

inline bool is_added_name(std::string_view name) { return name.starts_with(added_names::kPrefix); }

// Those of a class's methods.
std::vector<std::string> added_methods(const c10::ClassType& type);

}  // namespace tsmem
