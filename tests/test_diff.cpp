#include <gtest/gtest.h>
#include <torch/csrc/jit/ir/irparser.h>

#include <nlohmann/json.hpp>

#include "rewriter/compare/alignment.h"
#include "rewriter/compare/diff.h"
#include "rewriter/compare/diff_text.h"
#include "rewriter/compare/graph_lines.h"
#include "rewriter/error.h"
#include "rewriter/rewrite/added_names.h"

using namespace tsmem;
using torch::jit::Module;

static Module module_of(const std::string& source) {
  Module m("Net");
  m.register_parameter("weight", at::ones({2}), false);
  m.define(source);
  return m;
}

static std::vector<std::string> lines_of(const std::string& ir) {
  auto graph = std::make_shared<torch::jit::Graph>();
  torch::jit::parseIR(ir, graph.get());
  return graph_lines(*graph);
}

static MethodDiff only_change(const std::vector<MethodDiff>& d) {
  const MethodDiff* changed = nullptr;
  for (auto& m : d)
    if (m.status != "same") {
      EXPECT_EQ(changed, nullptr) << "more than one change";
      changed = &m;
    }
  EXPECT_NE(changed, nullptr) << "no change";
  return changed ? *changed : MethodDiff{};
}

TEST(Diff, LinesReadLikeCode) {
  auto lines = lines_of(R"(graph(%x.1 : Tensor, %flag : bool):
  %one : int = prim::Constant[value=1]()
  %sizes : int[] = prim::ListConstruct(%one, %one)
  %5 : Tensor = aten::add(%x.1, %x.1, %one)
  %6 : Tensor = prim::If(%flag)
    block0():
      %7 : Tensor = aten::relu(%5)
      -> (%7)
    block1():
      -> (%5)
  %8 : Tensor = aten::reshape(%6, %sizes)
  return (%8))");
  std::vector<std::string> expected = {"(%x: Tensor, %flag: bool):",
                                       "  %add = aten::add(%x, %x, 1)",
                                       "  %If = if %flag:",
                                       "    %relu = aten::relu(%add)",
                                       "    -> %relu",
                                       "  else:",
                                       "    -> %add",
                                       "  %reshape = aten::reshape(%If, [1, 1])",
                                       "  return %reshape"};
  EXPECT_EQ(lines, expected);
}

TEST(Diff, NumbersOfValuesAreNoDifference) {
  EXPECT_EQ(lines_of("graph(%1 : Tensor):\n  %7 : Tensor = aten::relu(%1)\n  return (%7)"),
            lines_of("graph(%0 : Tensor):\n  %3 : Tensor = aten::relu(%0)\n  return (%3)"));
}

TEST(Diff, SameModule) {
  auto source = "def forward(self, x):\n  return torch.relu(x) + self.weight\n";
  auto d = diff(module_of(source), module_of(source));
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0].status, "same");
  EXPECT_TRUE(d[0].removed_ops.empty() && d[0].added_ops.empty());
  EXPECT_TRUE(to_json(d)["equal"].get<bool>());
}

TEST(Diff, ReplacedOpLeavesTheOtherLinesAlone) {
  auto a = module_of("def forward(self, x):\n  y = torch.relu(x)\n  z = torch.neg(y)\n  return z + y\n");
  auto b = module_of("def forward(self, x):\n  y = torch.sigmoid(x)\n  z = torch.neg(y)\n  return z + y\n");
  auto d = only_change(diff(a, b));
  EXPECT_EQ(d.removed_ops, (std::map<std::string, int>{{"aten::relu", 1}}));
  EXPECT_EQ(d.added_ops, (std::map<std::string, int>{{"aten::sigmoid", 1}}));
  ASSERT_EQ(d.a.size(), d.b.size());
  int different = 0;
  for (size_t i = 0; i < d.a.size(); ++i) different += d.a[i] != d.b[i];
  EXPECT_EQ(different, 1);
}

TEST(Diff, SwappedOperandsDiffer) {
  auto a = module_of("def forward(self, x, y):\n  return x - y\n"),
       b = module_of("def forward(self, x, y):\n  return y - x\n");
  auto d = only_change(diff(a, b));
  EXPECT_TRUE(d.removed_ops.empty() && d.added_ops.empty());
}

TEST(Diff, ConstantsDiffer) {
  for (auto [x, y] :
       {std::pair("1", "2"), {"1.0", "1.5"}, {"True", "False"}, {"\"a\"", "\"b\""}, {"[1]", "[2]"}, {"1", "1.0"}}) {
    auto text = [](const std::string& v) { return "def forward(self, x):\n  return (x, " + v + ")\n"; };
    EXPECT_EQ(only_change(diff(module_of(text(x)), module_of(text(y)))).status, "changed") << x << " " << y;
  }
}

TEST(Diff, CallsThatWereInlinedCountAsTheirContents) {
  auto helper = "def inner(self, x):\n  return torch.relu(torch.neg(x))\n";
  auto a = module_of(std::string(helper) + "def forward(self, x):\n  return self.inner(x)\n");
  auto b = module_of(std::string(helper) + "def forward(self, x):\n  return torch.sigmoid(torch.neg(x))\n");
  auto d = only_change(diff(a, b));
  EXPECT_EQ(d.removed_ops, (std::map<std::string, int>{{"aten::relu", 1}}));
  EXPECT_EQ(d.added_ops, (std::map<std::string, int>{{"aten::sigmoid", 1}}));
}

TEST(Diff, MethodsThatCameAndWent) {
  auto a = module_of("def forward(self, x):\n  return x\n");
  auto b = module_of("def forward(self, x):\n  return x\ndef more(self, x):\n  return torch.relu(x)\n");
  EXPECT_EQ(only_change(diff(a, b)).status, "added");
  EXPECT_EQ(only_change(diff(b, a)).status, "removed");
  EXPECT_EQ(only_change(diff(b, a)).removed_ops, (std::map<std::string, int>{{"aten::relu", 1}}));
}

TEST(Diff, KeptOriginalsAreNotCompared) {
  auto a = module_of("def forward(self, x):\n  return x\n");
  auto b =
      module_of("def forward(self, x):\n  return x\ndef _tsmem_original_forward(self, x):\n  return torch.relu(x)\n");
  auto d = diff(a, b);
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0].status, "same");
  EXPECT_TRUE(added_methods(*a.type()).empty());
  EXPECT_EQ(added_methods(*b.type()), std::vector<std::string>{"_tsmem_original_forward"});
  EXPECT_EQ(only_change(diff(a, b, "_tsmem_original_forward")).status, "added");
}

TEST(Diff, AttributesDiffer) {
  auto a = module_of("def forward(self, x):\n  return x\n"), b = module_of("def forward(self, x):\n  return x\n");
  b.register_buffer("statistics", at::ones({2}));
  auto d = only_change(diff(a, b));
  EXPECT_EQ(d.method, "(attributes)");
  EXPECT_NE(render_text({d}, false, false).find("+statistics: Tensor"), std::string::npos);
}

TEST(Diff, InstancesOfAClassAreOneEntry) {
  auto tree = [](const std::string& body) {
    Module root("Root");
    Module leaf = module_of(body);
    root.register_module("first", leaf);
    root.register_module("second", leaf.deepcopy());
    root.define("def forward(self, x):\n  return self.second.forward(self.first.forward(x))\n");
    return root;
  };
  auto a = tree("def forward(self, x):\n  return torch.relu(x)\n"),
       b = tree("def forward(self, x):\n  return torch.neg(x)\n");
  auto d = only_change(diff(a, b));
  EXPECT_EQ(d.path, "first");
  EXPECT_EQ(d.instances, (std::vector<std::string>{"first", "second"}));
  EXPECT_NE(render_text({d}, true, false).find("first (and 1 more): Net.forward"), std::string::npos);
  auto total = total_difference(a, b, "forward");
  EXPECT_EQ(total.removed_ops, (std::map<std::string, int>{{"aten::relu", 2}}));
  EXPECT_EQ(total.added_ops, (std::map<std::string, int>{{"aten::neg", 2}}));
}

TEST(Diff, UnknownMethod) {
  auto m = module_of("def forward(self, x):\n  return x\n");
  try {
    diff(m, m, "forwrad");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind, ErrorKind::request);
    EXPECT_NE(std::string(e.what()).find("'forward'"), std::string::npos);
  }
}

TEST(Diff, TextHasHunksAndColor) {
  auto a = module_of("def forward(self, x):\n  return torch.relu(x)\n"),
       b = module_of("def forward(self, x):\n  return torch.neg(x)\n");
  auto d = diff(a, b);
  auto plain = render_text(d, false, false);
  EXPECT_NE(plain.find("@@ -1,3 +1,3 @@"), std::string::npos) << plain;
  EXPECT_NE(plain.find("\n-  %relu = aten::relu(%x)\n+  %relu = aten::neg(%x)\n   return %relu\n"), std::string::npos)
      << plain;
  EXPECT_EQ(plain.find('\033'), std::string::npos);
  EXPECT_NE(render_text(d, false, true).find("\033[31m"), std::string::npos);
  EXPECT_EQ(render_text(d, true, false).find("@@"), std::string::npos);
}

// What the edits make of `a`.
static std::vector<std::string> applied(const std::vector<std::string>& a, const std::vector<std::string>& b,
                                        const std::vector<Edit>& edits) {
  std::vector<std::string> out;
  size_t i = 0, j = 0;
  for (const Edit edit : edits) {
    if (edit == Edit::common) {
      EXPECT_EQ(a.at(i), b.at(j));
    }
    if (edit != Edit::removed) out.push_back(edit == Edit::common ? a.at(i) : b.at(j));
    i += edit != Edit::added;
    j += edit != Edit::removed;
  }
  EXPECT_EQ(i, a.size());
  return out;
}

TEST(Diff, AlignsTextsOfAnyLength) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{7}, size_t{999}, size_t{1001}, size_t{30'000}})
    for (const size_t every : {2, 3, 50}) {
      std::vector<std::string> a, b;
      for (size_t i = 0; i < n; ++i) {
        a.push_back(std::to_string(i % 17));
        if (i % every) b.push_back(i % (2 * every) == 1 ? "other" : a.back());
      }
      const auto edits = align(a, b);
      EXPECT_EQ(applied(a, b, edits), b) << n;
      if (every < 50 || n == 0) continue;
      EXPECT_LE(std::count_if(edits.begin(), edits.end(), [](Edit e) { return e != Edit::common; }),
                static_cast<std::ptrdiff_t>(n / 20 + 3));
    }
  EXPECT_EQ(align({"a", "b"}, {"a", "b"}), (std::vector{Edit::common, Edit::common}));
}

TEST(Diff, HunksCoverTheChanges) {
  std::vector<Edit> edits(30, Edit::common);
  edits[10] = Edit::removed;
  edits[17] = Edit::added;  // six common lines between them: one hunk
  edits[29] = Edit::added;
  const auto h = hunks(edits);
  ASSERT_EQ(h.size(), 2u);
  EXPECT_EQ(std::tuple(h[0].a, h[0].a_count, h[0].b, h[0].b_count), std::tuple(8u, 13u, 8u, 13u));
  EXPECT_EQ(std::tuple(h[1].a, h[1].a_count, h[1].b, h[1].b_count), std::tuple(26u, 3u, 26u, 4u));
  EXPECT_TRUE(hunks({}).empty());
}
