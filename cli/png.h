// SVG as PNG, by the program rsvg-convert (Debian: librsvg2-bin).
#pragma once
#include <string>

namespace tsmem::cli {

// Throws Error(ErrorKind::input) where png_of would not find its program.
void require_png();

// Throws Error(ErrorKind::input) where the program is missing or fails.
std::string png_of(const std::string& svg);

}  // namespace tsmem::cli
