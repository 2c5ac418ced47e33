// Which lines of two texts are the same.
#pragma once
#include <string>
#include <vector>

namespace tsmem {

enum class Edit { common, removed, added };

// What to do with each line, in order, to make `b` of `a`: the fewest changes where the texts have at most a thousand
// lines beside those that they begin and end with. Longer ones are gone through in pieces, so that the time grows with
// the number of lines alone.
std::vector<Edit> align(const std::vector<std::string>& a, const std::vector<std::string>& b);

struct Hunk {                     // changes with the lines around them
  size_t a, a_count, b, b_count;  // first line of each text, from 1, and how many
  size_t begin, end;              // in what align() returned
};

// Changes with up to three common lines before and after, those put together that touch.
std::vector<Hunk> hunks(const std::vector<Edit>& edits);

}  // namespace tsmem
