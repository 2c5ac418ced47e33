// Small helpers on text and names.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tsmem {

// The name that a typo most likely meant, or "" where none is near (Damerau-Levenshtein distance at most a third of its
// length).
std::string nearest(const std::string& typo, const std::vector<std::string>& names);

// True where `path` ("layer1.0.bn1") matches `glob`: fnmatch on each part, `**` across parts.
bool glob_match(const std::string& glob, const std::string& path);

// True where `glob` matches `path` or one of the modules around it ("layer1" holds "layer1.0.bn1").
bool glob_covers(const std::string& glob, const std::string& path);

// Without the white space around it.
std::string_view strip(std::string_view text);

// Nothing but `text`, or with the terminal's codes for a colour around it.
enum class Color { bold, red, green, cyan, dim };
std::string paint(std::string_view text, Color color, bool use);

}  // namespace tsmem
