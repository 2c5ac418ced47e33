// Self-contained HTML pages: a template, a script, and the data that it draws.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tsmem::cli {

// Texts of cli/page/, put into the program when it is built.
extern const char* const kPageTemplate;
extern const char* const kTimelineScript;
extern const char* const kDiffScript;

std::string page(const std::string& title, const std::string& script, const nlohmann::json& data);

}  // namespace tsmem::cli
