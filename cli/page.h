// Self-contained HTML pages: a template, scripts, and the data that they draw.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tsmem::cli {

// Texts of cli/page/, put into the program when it is built.
extern const char* const kPageTemplate;
extern const char* const kChartScript;
extern const char* const kModulesScript;
extern const char* const kDiffScript;

std::string page(const std::string& title, const std::vector<std::string>& scripts, const nlohmann::json& data);

}  // namespace tsmem::cli
