// Small helpers on names.
#pragma once
#include <string>
#include <vector>

namespace tsmem {

// The name that a typo most likely meant, or "" where none is near (Damerau-Levenshtein distance at most a third of its
// length).
std::string nearest(const std::string& typo, const std::vector<std::string>& names);

// True where `path` ("layer1.0.bn1") matches `glob`: fnmatch on each part, `**` across parts.
bool glob_match(const std::string& glob, const std::string& path);

// True where `glob` matches `path` or one of the modules around it ("layer1" holds "layer1.0.bn1").
bool glob_covers(const std::string& glob, const std::string& path);

}  // namespace tsmem
