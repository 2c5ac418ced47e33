// What a comparison found, in words and as JSON.
#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "rewriter/verify/verify.h"

namespace tsmem {

static nlohmann::json number(double x) { return std::isfinite(x) ? nlohmann::json(x) : nlohmann::json(nullptr); }

std::string compared_text(const VerifyResult& r) {
  // Modes with the same inputs and dtypes in one part: "4 calls each in train and eval mode on 3x3x64x64 float32, ...".
  struct Part {
    std::vector<std::string> modes;
    const Compared* what;
  };
  std::vector<Part> parts;
  for (const auto& c : r.compared) {
    auto same = std::find_if(parts.begin(), parts.end(), [&](const Part& p) {
      return p.what->inputs == c.inputs && p.what->dtypes == c.dtypes && p.what->calls == c.calls;
    });
    if (same == parts.end()) same = parts.insert(parts.end(), Part{{}, &c});
    same->modes.push_back(c.mode);
  }
  std::string text;
  for (const auto& p : parts) {
    auto inputs = p.what->inputs;
    const size_t n = inputs.size();
    if (n > 3) inputs.resize(3);
    const std::string more = n > 3 ? fmt::format(" and {} more", n - 3) : std::string();
    text += fmt::format("{}{} call{}{} in {} on {} ({}{}) in {}", text.empty() ? "" : "; ", p.what->calls,
                        p.what->calls == 1 ? "" : "s", p.modes.size() > 1 ? " each" : "", fmt::join(p.modes, ", "),
                        p.what->given ? "the inputs given" : "smaller inputs", fmt::join(inputs, ", "), more,
                        fmt::join(p.what->dtypes, " and "));
  }
  if (text.empty()) return "";
  text = "Compared: " + text + ".";
  if (!r.thorough) text += " A thorough verification compares everything on the inputs given.";
  return text;
}

nlohmann::json to_json(const VerifyResult& r) {
  auto calls = nlohmann::json::array();
  auto pair = [](const double(&p)[2]) { return nlohmann::json{number(p[0]), number(p[1])}; };
  for (auto& c : r.calls)
    calls.push_back({{"mode", c.mode},
                     {"output_error", number(c.output_error)},
                     {"gradient_error", number(c.gradient_error)},
                     {"buffer_error", number(c.buffer_error)},
                     {"f64_error", number(c.f64_error)},
                     {"reference_errors",
                      {{"output", pair(c.reference_output)},
                       {"gradient", pair(c.reference_gradient)},
                       {"buffer", pair(c.reference_buffer)}}}});
  auto compared = nlohmann::json::array();
  for (auto& c : r.compared)
    compared.push_back({{"mode", c.mode},
                        {"inputs", c.inputs},
                        {"given", c.given},
                        {"calls", c.calls},
                        {"dtypes", c.dtypes},
                        {"output_error", number(c.output_error)},
                        {"gradient_error", number(c.gradient_error)},
                        {"buffer_error", number(c.buffer_error)}});
  return {{"equal", r.equal},
          {"verdict", r.verdict},
          {"compared", compared},
          {"thorough", r.thorough},
          {"seconds", r.seconds},
          {"first_step_seconds", r.first_step_seconds},
          {"differences", r.differences},
          {"notes", r.notes},
          {"calls", calls},
          {"state_dict_equal", r.state_dict_equal},
          {"gradients_only_in", {{"a", r.gradients_only_in_a}, {"b", r.gradients_only_in_b}}},
          {"median_ratios",
           {{"output", number(r.ratio_output)},
            {"gradient", number(r.ratio_gradient)},
            {"buffer", number(r.ratio_buffer)}}},
          {"saved_bytes", {r.saved_bytes[0], r.saved_bytes[1]}},
          {"peak_bytes", {r.peak_bytes[0], r.peak_bytes[1]}},
          {"step_seconds", {r.step_seconds[0], r.step_seconds[1]}}};
}

}  // namespace tsmem
