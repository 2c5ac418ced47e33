#include "rewriter/graph/exported_program.h"

#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "rewriter/error.h"
#include "rewriter/graph/check_exported.h"
#include "rewriter/graph/exported_graph.h"
#include "rewriter/graph/exported_schema.h"
#include "rewriter/graph/outline_regions.h"
#include "rewriter/graph/tensor_values.h"

namespace tsmem {
namespace {

using caffe2::serialize::PyTorchStreamReader;
using nlohmann::json;
using torch::jit::Module;

// The order of names in weights' descriptions is that of the state_dict.
using ordered_json = nlohmann::ordered_json;

constexpr int kSchemaMajor = 8, kDeepestGraph = 64;
const std::string kModels = "models/", kWeights = "data/weights/", kConstants = "data/constants/", kExtra = "extra/";

std::string graph_record(const std::string& name) { return kModels + name + ".json"; }
std::string weights_config(const std::string& name) { return kWeights + name + "_weights_config.json"; }
std::string constants_config(const std::string& name) { return kConstants + name + "_constants_config.json"; }

Error damaged(const std::string& path, const std::string& why) {
  return Error(ErrorKind::input, "'" + path + "' is damaged: " + why + "; copy or save it again.");
}

std::string text_of(PyTorchStreamReader& reader, const std::string& record) {
  auto [data, size] = reader.getRecord(record);
  return {static_cast<const char*>(data.get()), size};
}

template <class Json>
Json parse(const std::string& path, const std::string& record, const std::string& text) {
  try {
    return Json::parse(text, [](int depth, typename Json::parse_event_t, Json&) {
      if (depth > kDeepestGraph) throw std::length_error("");
      return true;
    });
  } catch (const std::length_error&) {
    throw damaged(path, fmt::format("record '{}' is nested more than {} deep", record, kDeepestGraph));
  } catch (const json::exception&) {
    throw damaged(path, "record '" + record + "' is not JSON");
  }
}

// Calls `work`, which looks into a record's JSON.
template <class F>
auto looking_into(const std::string& path, const std::string& record, F work) {
  try {
    return work();
  } catch (const json::exception&) {
    throw damaged(path, "record '" + record + "' is not as torch.export writes it");
  }
}

// The names of the archive's programs.
std::vector<std::string> programs_of(const Archive& archive) {
  std::vector<std::string> names;
  for (const auto& [record, _] : archive.records)
    if (record.starts_with(kModels) && record.ends_with(".json"))
      names.push_back(record.substr(kModels.size(), record.size() - kModels.size() - 5));
  return names;
}

bool has_folder(const Archive& archive, const std::string& folder) {
  const auto first = archive.records.lower_bound(folder);
  return first != archive.records.end() && first->first.starts_with(folder);
}

// Why the archive holds no program that could be trained, as the rest of a sentence; "" where it holds one.
std::string unfit(const Archive& archive) {
  if (archive.has("serialized_exported_program.json"))
    return "is in torch.export's format from before torch 2.9; load and save it again with torch.export.load and "
           "torch.export.save";
  const auto names = programs_of(archive);
  if (names.empty() && has_folder(archive, "data/aotinductor/"))
    return "is compiled by AOTInductor for inference and holds no graph to train; give the file that torch.export.save "
           "wrote";
  if (names.empty())
    return "is an archive of torch.export that holds no program; give one that torch.export.save wrote";
  if (names.size() > 1)
    return fmt::format("holds {} programs ({}); save each by itself with torch.export.save", names.size(),
                       fmt::join(names, ", "));
  for (const auto& record : {weights_config(names[0]), constants_config(names[0])})
    if (!archive.has(record))
      return "lacks the record '" + record + "'; load and save it again with torch.export.load and torch.export.save";
  return "";
}

// The same of the program itself.
std::string unfit(const json& program) {
  const json& version = program.at("schema_version");
  if (const auto major = version.at("major").get<int64_t>(); major != kSchemaMajor)
    return fmt::format("has schema version {}.{}, and tsmem " TSMEM_VERSION
                       " reads version {}; export the model again with torch 2.11 "
                       "to 2.15",
                       major, version.at("minor").get<int64_t>(), kSchemaMajor);
  for (const json& verifier : program.at("verifiers"))
    if (verifier == "TRAINING") return "";
  return "was made for inference (by run_decompositions, or by a torch before 2.9) and can't train; save the program "
         "as "
         "torch.export.export returns it";
}

struct Geometry {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
};

// Of "tensor_meta", for whose tensor there must be `bytes`. Throws std::string: what is wrong with it.
Geometry geometry_of(const ordered_json& meta, uint64_t bytes) {
  Geometry g;
  const auto number = [](const ordered_json& n) {
    const auto value = n.at("as_int").get<int64_t>();
    if (value < 0) throw std::string("has a negative size");
    return value;
  };
  for (const auto& n : meta.at("sizes")) g.sizes.push_back(number(n));
  for (const auto& n : meta.at("strides")) g.strides.push_back(number(n));
  g.offset = number(meta.at("storage_offset"));
  g.dtype = dtype_of(meta.at("dtype").get<int64_t>());
  if (g.dtype == at::ScalarType::Undefined) throw std::string("has a dtype that tsmem does not know");
  if (layout_of(meta.at("layout").get<int64_t>()) != static_cast<int64_t>(c10::kStrided))
    throw std::string("is not a dense tensor");
  if (g.sizes.size() != g.strides.size()) throw std::string("has another number of strides than of sizes");
  // The last element's place, and how many there are, without overflow.
  unsigned __int128 last = static_cast<uint64_t>(g.offset);
  bool empty = false;
  for (size_t i = 0; i < g.sizes.size(); ++i) {
    empty |= g.sizes[i] == 0;
    if (g.sizes[i] > 1) {
      const auto step = static_cast<unsigned __int128>(g.sizes[i] - 1) * static_cast<uint64_t>(g.strides[i]);
      if (step > UINT64_MAX) throw std::string("reaches beyond its record");
      last += step;
    }
  }
  if (!empty && (last + 1) * c10::elementSize(g.dtype) > bytes) throw std::string("reaches beyond its record");
  return g;
}

// The program's parameters, buffers and constants, read as they are asked for. What is described alike is one tensor.
class State {
 public:
  State(const ExportedProgram& program, c10::Device device)
      : path_(program.path), device_(device), reader_(program.path) {
    read_config(weights_config(program.name), kWeights);
    read_config(constants_config(program.name), kConstants);
  }

  at::Tensor operator()(const std::string& name) {
    const auto entry = entries_.find(name);
    if (entry == entries_.end())
      throw damaged(path_, "the graph reads '" + name + "', which the archive does not hold");
    return looking_into(path_, entry->second.config, [&] { return tensor(name, entry->second); });
  }

 private:
  struct Entry {
    std::string config, folder;
    ordered_json payload;
  };

  void read_config(const std::string& record, const std::string& folder) {
    const auto config = parse<ordered_json>(path_, record, text_of(reader_, record));
    looking_into(path_, record, [&] {
      for (const auto& [name, payload] : config.at("config").items()) entries_[name] = {record, folder, payload};
    });
  }

  at::Tensor tensor(const std::string& name, const Entry& entry) {
    const auto& payload = entry.payload;
    if (payload.at("use_pickle").get<bool>())
      throw Error(ErrorKind::input, "'" + path_ + "' holds '" + name +
                                        "' as a pickled object or tensor subclass, which tsmem does not read; export "
                                        "the model with plain tensors.");
    const auto file = payload.at("path_name").get<std::string>();
    const bool parameter = payload.at("is_param").get<bool>();
    const auto& meta = payload.at("tensor_meta");
    const bool grad = parameter && meta.at("requires_grad").get<bool>();
    at::Tensor& t = made_[{entry.folder + file, meta.dump(), parameter}];
    if (t.defined()) return t;
    const c10::Storage& storage = storage_of(entry.folder + file);
    try {
      const Geometry g = geometry_of(meta, storage.nbytes());
      const at::NoGradGuard no_grad;
      t = at::empty({0}, at::TensorOptions(g.dtype).device(device_)).set_(storage, g.offset, g.sizes, g.strides);
    } catch (const std::string& fault) {
      throw damaged(path_, "tensor '" + name + "' " + fault);
    }
    if (grad && !t.is_floating_point() && !t.is_complex())
      throw damaged(path_, "tensor '" + name + "' can't have a gradient");
    t.set_requires_grad(grad);
    return t;
  }

  const c10::Storage& storage_of(const std::string& record) {
    const auto known = storages_.find(record);
    if (known != storages_.end()) return known->second;
    if (!reader_.hasRecord(record)) throw damaged(path_, "record '" + record + "' is missing");
    at::Tensor bytes;
    if (device_.is_meta()) {
      bytes = at::empty({static_cast<int64_t>(reader_.getRecordSize(record))},
                        at::TensorOptions(at::kByte).device(device_));
    } else {
      auto [data, size] = reader_.getRecord(record);
      const c10::Storage read(c10::Storage::use_byte_size_t(), size, std::move(data), nullptr, /*resizable=*/false);
      bytes = at::empty({0}, at::kByte).set_(read).to(device_);
    }
    return storages_.emplace(record, bytes.storage()).first->second;
  }

  std::string path_;
  c10::Device device_;
  PyTorchStreamReader reader_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, c10::Storage> storages_;
  std::map<std::tuple<std::string, std::string, bool>, at::Tensor> made_;
};

// The description of the weights, with requires_grad as it is in the module; "" where nothing has changed.
std::string new_config(const std::string& path, const std::string& record, const std::string& text,
                       const Module& module) {
  auto config = parse<ordered_json>(path, record, text);
  bool changed = false;
  std::map<std::string, at::Tensor> parameters;
  for (const auto& p : module.named_parameters()) parameters[p.name] = p.value;
  looking_into(path, record, [&] {
    for (auto& [name, payload] : config.at("config").items()) {
      const auto p = parameters.find(name);
      if (p == parameters.end() || !payload.at("is_param").template get<bool>()) continue;
      auto& grad = payload.at("tensor_meta").at("requires_grad");
      changed |= grad != p->second.requires_grad();
      grad = p->second.requires_grad();
    }
  });
  return changed ? config.dump() : "";
}

// The file format's own records, which the writer makes.
bool is_made_by_writer(const std::string& record) { return record.starts_with(".data/") || record == "byteorder"; }

}  // namespace

bool is_exported(const Archive& archive) {
  return archive.has("archive_format") || archive.has("serialized_exported_program.json") ||
         !programs_of(archive).empty();
}

ExportedProgram read_exported(const std::string& path, const Archive& archive) {
  if (const auto why = unfit(archive); !why.empty()) throw Error(ErrorKind::input, "'" + path + "' " + why + ".");
  ExportedProgram program{path, programs_of(archive)[0], {}};
  PyTorchStreamReader reader(path);
  if (reader.hasRecord("byteorder") && text_of(reader, "byteorder") != "little")
    throw Error(ErrorKind::input, "'" + path + "' was written on a big-endian machine; save it again on this one.");
  const auto record = graph_record(program.name);
  program.program = parse<json>(path, record, text_of(reader, record));
  const auto why = looking_into(path, record, [&] {
    const auto reason = unfit(program.program);
    if (reason.empty() && !is_graph_module(program.program.at("graph_module")))
      throw damaged(path, "record '" + record + "' is not as torch.export writes it");
    return reason;
  });
  if (!why.empty()) throw Error(ErrorKind::input, "'" + path + "' " + why + ".");
  return program;
}

std::map<std::string, std::string> extra_files_of(const ExportedProgram& program) {
  std::map<std::string, std::string> files;
  PyTorchStreamReader reader(program.path);
  for (const std::string& record : reader.getAllRecords())
    if (record.starts_with(kExtra)) files[record.substr(kExtra.size())] = text_of(reader, record);
  return files;
}

Module module_of(const ExportedProgram& program, c10::Device device) {
  State state(program, device);
  return looking_into(program.path, graph_record(program.name), [&] {
    return module_of_graph(program.program.at("graph_module"), [&](const std::string& name) { return state(name); });
  });
}

void write_exported(const ExportedProgram& program, const Module& rewritten,
                    const std::map<std::string, std::string>& extra_files,
                    const std::function<size_t(const void*, size_t)>& write) {
  json changed = program.program;
  changed["graph_module"] = graph_of_module(rewritten, program.program.at("graph_module"));
  describe_tensors(changed["graph_module"]["graph"]);
  outline_regions(changed["graph_module"]["graph"]);

  PyTorchStreamReader reader(program.path);
  caffe2::serialize::PyTorchStreamWriter writer(write);
  writer.setMinVersion(reader.version());
  for (const std::string& record : reader.getAllRecords()) {
    if (is_made_by_writer(record) || record.starts_with(kExtra)) continue;
    std::string text;
    if (record == graph_record(program.name)) text = changed.dump();
    if (record == weights_config(program.name))
      text = new_config(program.path, record, text_of(reader, record), rewritten);
    if (!text.empty()) {
      writer.writeRecord(record, text.data(), text.size());
      continue;
    }
    auto [data, size] = reader.getRecord(record);
    writer.writeRecord(record, data.get(), size);
  }
  for (const auto& [name, text] : extra_files) writer.writeRecord(kExtra + name, text.data(), text.size());
  writer.writeEndOfFile();
}

}  // namespace tsmem
