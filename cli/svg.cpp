#include "cli/svg.h"

#include <fmt/format.h>

#include <cmath>

namespace tsmem::cli {

std::string svg_head(double width, double height) {
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{0}' height='{1}' viewBox='0 0 {0} {1}' "
      "font-family='DejaVu Sans, Verdana, sans-serif' font-size='11.5'>\n"
      "<style>.paper{{fill:#fff}}text{{fill:#1b1b1b}}.title{{font-size:15px;font-weight:bold}}.end{{text-anchor:end}}"
      ".middle{{text-anchor:middle}}.shade{{fill:#f1f1f1}}.grid{{stroke:#ddd}}.mark{{stroke:#555;stroke-dasharray:4 3}}"
      ".peak{{fill:#fff;stroke:#000;stroke-width:2}}"
      ".halo{{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round;font-weight:bold}}"
      "@media (prefers-color-scheme:dark){{.paper{{fill:#15181c}}text{{fill:#e6e6e6}}.shade{{fill:#262b31}}"
      ".grid{{stroke:#3a4048}}.mark{{stroke:#aaa}}.peak{{fill:#15181c;stroke:#fff}}.halo{{stroke:#15181c}}}}</style>\n"
      "<rect width='{0}' height='{1}' class='paper'/>\n",
      width, height);
}

std::string svg_text(const std::string& text) {
  std::string out;
  for (char c : text)
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  return out;
}

// Of the font's letters at 11.5 px, bold ones are a seventh wider.
double text_width(const std::string& text, bool bold) {
  double width = 0;
  for (unsigned char c : text)
    if (c < 0x80 || c >= 0xc0)  // one for all bytes of a character
      width += c == 'm' || c == 'w' || c == 'M' || c == 'W' || c >= 0xc0 ? 11.5 : 7.6;
  return bold ? width * 8 / 7 : width;
}

std::string shortened(const std::string& text, double width, bool bold) {
  if (text_width(text, bold) <= width) return text;
  for (size_t keep = text.size(); keep > 1; --keep) {
    // Never inside a character.
    size_t head = keep / 2, tail = text.size() - (keep - keep / 2);
    const auto inside = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
    while (head > 0 && inside(head)) --head;
    while (tail < text.size() && inside(tail)) ++tail;
    auto cut = text.substr(0, head) + "…" + text.substr(tail);
    if (text_width(cut, bold) <= width) return cut;
  }
  return "…";
}

double mark_step(double range, int count) {
  const double rough = range / count, power = std::pow(10, std::floor(std::log10(rough)));
  for (double m : {1., 2., 5.})
    if (rough <= m * power) return m * power;
  return 10 * power;
}

std::string mark_text(double v) { return fmt::format("{:.6g}", v); }

}  // namespace tsmem::cli
