// tsmem plan: peak memory against step time.
#include <memory>

#include "cli.h"
#include "rewriter/error.h"

namespace tsmem::cli {

Run add_plan(CLI::App& app, const Common&) {
  struct Options {
    std::string model, plot, json;
    std::vector<std::string> inputs;
  };
  auto o = std::make_shared<Options>();
  app.description("Show peak memory against step time (not in this version)");
  app.add_option("MODEL.pt", o->model, "A TorchScript file")->required();
  app.add_option("--input", o->inputs, "An argument of forward, such as 8x3x224x224; repeatable")
      ->type_name("SPEC")
      ->allow_extra_args(false);
  app.add_option("--plot", o->plot, "Draw the front to this file")->type_name("FILE");
  app.add_option("--json", o->json, "Write the points to this file")->type_name("FILE");
  app.footer("Example: tsmem plan model.pt --input 8x3x224x224 --plot front.svg");
  return [o]() -> int {
    throw Error(kUsage, "This version of tsmem can't plan; 'tsmem rewrite " + o->model +
                            " -o OUT.pt' rewrites operators, and 'tsmem profile --vs' shows what that saves.");
  };
}

}  // namespace tsmem::cli
