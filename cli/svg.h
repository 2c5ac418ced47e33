// What all SVG pictures share.
#pragma once
#include <string>
#include <vector>

namespace tsmem::cli {

// What an SVG begins with: size, font and the classes that pictures use, light and dark.
std::string svg_head(double width, double height);

// A text with &, < and quotes escaped.
std::string svg_text(const std::string& text);

// About how wide a text is drawn, rather too wide than too narrow, and a text that is at most so wide, its middle left
// out where it is longer.
double text_width(const std::string& text, bool bold = false);
std::string shortened(const std::string& text, double width, bool bold = false);

// A distance between marks of an axis: 1, 2 or 5 times a power of ten, so that about `count` of them make `range`.
double mark_step(double range, int count);
std::string mark_text(double value);

}  // namespace tsmem::cli
