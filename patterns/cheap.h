// Rules for the operators of ops/cheap_table.h, whose outputs can be recomputed in backward.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "ops/cheap_table.h"
#include "patterns/pattern.h"

namespace tsmem {

// The canonical names of operators whose outputs are kept anyway or recomputed, for Rule::fed_by.
const std::set<std::string>& recomputed_operators();

// One rule for each operator of the table and number of arguments.
std::vector<Rule> cheap_rules(Worth worth);

}  // namespace tsmem
