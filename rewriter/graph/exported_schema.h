// The words of torch.export's JSON (torch/_export/serde/schema.py).
#pragma once
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace tsmem {

// Its own numbers for dtypes, layouts and memory formats; -1 for what they don't know.
c10::ScalarType dtype_of(int64_t exported);
int64_t exported_dtype(c10::ScalarType dtype);
int64_t layout_of(int64_t exported);
int64_t exported_layout(int64_t layout);
int64_t memory_format_of(int64_t exported);
int64_t exported_memory_format(int64_t format);

// Calls f with every name of a value in an argument, in order. Names inside of nested graphs are theirs alone.
void for_each_name(nlohmann::json& argument, const std::function<void(nlohmann::json& name)>& f);
void for_each_name(const nlohmann::json& argument, const std::function<void(const std::string& name)>& f);

// The names in all of a node's inputs, or of a list of arguments.
std::vector<std::string> names_in(const nlohmann::json& arguments);

// "torch.ops.aten.add_.Tensor": {"aten::add_", "Tensor"}; an overload "default" is "". Empty names for what is no
// operator.
struct OperatorOverload {
  std::string name, overload;
};
OperatorOverload operator_of(const std::string& target);
std::string target_of(const OperatorOverload& op);

}  // namespace tsmem
