// tsmem import: a program of torch.export as a TorchScript file that trains.
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "rewriter/file/model_file.h"
#include "rewriter/file/new_file.h"
#include "rewriter/graph/import_exported.h"

namespace tsmem::cli {
namespace {

struct ImportArguments {
  std::string model, output, json_file;
  bool force = false;
};

void check_files(const ImportArguments& o) {
  check_report(o.json_file);
  if (same_file(o.model, o.output))
    throw Error(ErrorKind::request,
                "The output '" + o.output + "' is the input, which is never overwritten; choose another name.");
  check_output(o.output, o.force);
  for (const auto& file : {o.model, o.output})
    if (!o.json_file.empty() && (o.json_file == file || same_file(o.json_file, file)))
      throw Error(ErrorKind::request, "--json '" + o.json_file + "' is a model's name; choose another.");
}

int import_file(const ImportArguments& o, const Common& common) {
  check_files(o);
  const ModelFile file = load_model(o.model, "meta");
  if (!file.exported) throw Error(ErrorKind::input, "'" + o.model + "' is TorchScript already, and needs no import.");
  const Imported imported = import_exported(*file.exported);
  {
    PendingModel pending(imported.module, file.extra_files, o.output, o.force);
    load_model(pending.temporary(), "meta");  // what PyTorch can't load is no result
    pending.commit();
  }
  if (!o.json_file.empty())
    write_json({{"tool", "tsmem"},
                {"version", TSMEM_VERSION},
                {"input", o.model},
                {"output", o.output},
                {"flags", imported.flags},
                {"notes", imported.notes}},
               o.json_file, {o.model, o.output});
  if (common.quiet || o.json_file == "-") return kOk;
  if (imported.flags) print(counted(imported.flags, "operator") + " in train or eval mode, as the module is\n");
  for (const auto& note : imported.notes) print(note + "\n");
  print("Written: " + o.output + "\n");
  return kOk;
}

}  // namespace

Run add_import(CLI::App& app, const Common& common) {
  auto o = std::make_shared<ImportArguments>();
  app.add_option("MODEL.pt2", o->model, "A file of torch.export.save")->required();
  app.add_option("-o,--output", o->output, "The TorchScript file")->type_name("OUT.pt")->required();
  app.add_flag("--force", o->force, "Replace an existing output");
  app.add_option("--json", o->json_file, "Write a report; '-' for standard output")->type_name("FILE");
  app.footer(
      "The file trains from C++ and Python, with or without 'tsmem rewrite': train() and eval() switch its mode "
      "again.\n"
      "Example: tsmem import model.pt2 -o model.pt");
  return [o, &common] { return import_file(*o, common); };
}

}  // namespace tsmem::cli
