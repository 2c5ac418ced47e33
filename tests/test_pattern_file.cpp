// A user's own patterns: the text file, its faults, and what they do to a model.
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/testing/file_check.h>
#include <torch/library.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "patterns/pattern.h"
#include "rewriter/error.h"
#include "rewriter/patterns/pattern_check.h"
#include "rewriter/rewrite/rewrite.h"
#include "rewriter/verify/verify.h"

using torch::jit::Module;
using torch::jit::testing::FileCheck;
using tsmem::Pattern;

TORCH_LIBRARY(mine, m) {
  m.def("add_relu(Tensor x, Tensor y) -> Tensor",
        [](const at::Tensor& x, const at::Tensor& y) { return at::relu(x + y); });
  m.def("scaled_relu(Tensor x, float scale=1.0, int[] unused=[]) -> Tensor",
        [](const at::Tensor& x, double scale, at::IntArrayRef) { return at::relu(x) * scale; });
  m.def("halves(Tensor x) -> (Tensor, Tensor)", [](const at::Tensor& x) { return std::make_tuple(x * 0.5, x * 0.5); });
  m.def("rank(Tensor x) -> int", [](const at::Tensor& x) { return x.dim(); });
  m.def("wrong(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 2; });
  m.def("triple(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 3; });
}

namespace {

// A file that goes when the test ends.
struct File {
  std::string path = (std::filesystem::path(testing::TempDir()) /
                      (std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) + ".patterns"))
                         .string();
  explicit File(const std::string& text) { std::ofstream(path) << text; }
  ~File() { std::filesystem::remove(path); }
};

std::vector<Pattern> patterns(const std::string& text) { return tsmem::read_patterns(File(text).path); }

// "4:8: what" of the error that a text ends in, or "" where it has none.
std::string fault(const std::string& text) {
  const File file(text);
  try {
    tsmem::read_patterns(file.path);
  } catch (const tsmem::Error& e) {
    EXPECT_EQ(e.kind, tsmem::ErrorKind::input);
    const std::string what = e.what();
    EXPECT_TRUE(what.starts_with(file.path + ":")) << what;
    EXPECT_TRUE(what.ends_with(".") && what.find('\n') == what.npos) << what;
    return what.substr(file.path.size() + 1);
  }
  return "";
}

Module net(const std::string& forward) {
  Module m("Net");
  m.register_attribute("training", c10::BoolType::get(), true);
  m.register_parameter("w", at::randn({3, 4}), false);
  m.define(forward);
  return m;
}

Module reload(const Module& m) {
  std::stringstream s;
  m.save(s);
  return torch::jit::load(s);
}

tsmem::RewriteReport rewrite_with(Module& m, const std::string& text) {
  tsmem::RewriteOptions o;
  o.level = tsmem::Level::ops;
  o.patterns = patterns(text);
  return tsmem::rewrite(m, o);
}

std::string graph(const Module& m) { return m.get_method("forward").graph()->toString(false); }

void expect_same_numbers(const Module& a, const Module& b) {
  tsmem::VerifyOptions o;
  o.measure = false;
  const auto r = tsmem::verify(a, reload(b), {at::randn({3, 4})}, o);
  EXPECT_TRUE(r.equal) << r.verdict;
}

const std::string kAddRelu =
    "pattern add-relu\nmatch\n  %s = add(%x, %y)\n  %z = relu(%s)\nrewrite\n  %z = mine::add_relu(%x, %y)\n";

}  // namespace

TEST(PatternFile, ReadsEveryLineOfTheLanguage) {
  const auto all = patterns(
      "# two of them\r\n"
      "pattern one\r\n"
      "about z = relu(x + y), twice\n"
      "match   # the sum first\n"
      "\t%s = add( %x ,%y )\n"
      "\n"
      "  # a comment\n"
      "  %z=act(%s)   # and the activation\n"
      "rewrite %z = mine::add_relu(%x, %y)\n"
      "keeps %x, %y\n"
      "activations relu, in-place\n"
      "fed-by conv2d, linear\n"
      "match %s = add(%x, 1)\n"
      "      %z = relu(%s)\n"
      "rewrite\n"
      "  %s = add(%x, 1)\n"
      "  %z = mine::scaled_relu(%s)\n"
      "shared %s\n"
      "keeps nothing\n"
      "only-by-name\n"
      "pattern two\n"
      "match\n  %z = leaky_relu(%x, -0.1)\nrewrite\n  %z = mine::wrong(%x)\nonly-at-regions");
  ASSERT_EQ(all.size(), 2u);
  const auto& [one, two] = std::tie(all[0], all[1]);
  EXPECT_EQ(one.name + "|" + one.algebra, "one|z = relu(x + y), twice");
  EXPECT_TRUE(!one.by_default && !one.for_regions && two.by_default && two.for_regions);
  ASSERT_EQ(one.rules.size(), 2u);
  using S = std::set<std::string>;
  EXPECT_EQ(one.rules[0].intact, (S{"x", "y"}));
  EXPECT_EQ(one.rules[0].activations, (S{"relu", "in-place"}));
  EXPECT_EQ(one.rules[0].fed_by, (S{"conv2d", "linear"}));
  EXPECT_EQ(one.rules[1].shared, S{"s"});
  EXPECT_EQ(one.rules[1].intact, S{});
  EXPECT_EQ(two.rules[0].intact, S{"x"});  // all that the rewrite reads
}

// Each text has one fault; what is said begins with its line and column.
TEST(PatternFile, SaysWhereAFaultIsAndWhatWasExpected) {
  const std::string p = "pattern p\nmatch\n", r = "rewrite\n  %z = mine::add_relu(%x, %y)\n";
  const std::string m = "pattern p\nmatch\n  %s = add(%x, %y)\n  %z = relu(%s)\n";
  const std::vector<std::pair<std::string, std::string>> table = {
      // The file.
      {"", "1:1: expected a line such as 'pattern my-pattern'"},
      {"# nothing\n", "2:1: expected a line such as 'pattern my-pattern'"},
      {"match\n", "1:1: expected 'pattern NAME' before match"},
      {"pattern\n", "1:9: expected a name of letters, digits and '-'"},
      {"pattern two words\n", "1:9: expected a name of letters, digits and '-'"},
      {"pattern p\n", "1:9: pattern p has no match"},
      {"pattern bn-act\n", "1:9: tsmem has a pattern 'bn-act' of its own: choose another name"},
      {m + r + "pattern p\n", "7:9: there are two patterns 'p'"},
      {"pattern p\nreplace\n", "2:1: expected a line of operators, which begins with %, or one of pattern, about"},
      {"pattern p\nmach\n", "found 'mach' (did you mean 'match'?)"},
      {"pattern p\n  %z = relu(%x)\n", "2:3: expected match or rewrite before lines of operators"},
      {"pattern p\nrewrite\n", "2:1: expected match before rewrite"},
      {p + "  %z = relu(%x)\n", "2:1: expected rewrite after match, and the file has none"},
      {p + "  %z = relu(%x)\nmatch\n", "4:1: expected rewrite before another match"},
      {m + r + "keeps %x\nkeeps %y\n", "8:1: keeps is there twice"},
      {m + r + "only-by-name please\n", "7:14: expected nothing after only-by-name"},
      // Lines.
      {p + r, "2:1: expected lines to match, such as %z = relu(%x)"},
      {p + "  %z relu(%x)\n" + r, "3:6: expected '=' after the values that the line makes, found 'relu'"},
      {p + "  %z, = relu(%x)\n" + r, "3:7: expected a line such as %z = relu(%x), found '='"},
      {p + "  % = relu(%x)\n" + r, "3:3: expected a line such as %z = relu(%x), found '%'"},
      {p + "  %z =\n" + r, "3:7: expected an operator such as relu or mine::op, found the line's end"},
      {p + "  %z = mine::(%x)\n" + r, "3:14: expected an operator's name after 'mine::', found '('"},
      {p + "  %z = relu %x\n" + r, "3:13: expected '(' after relu, found '%'"},
      {p + "  %z = relu(x)\n" + r, "3:13: expected an argument: a value such as %x, a number, true, None"},
      {p + "  %z = relu(%x\n" + r, "3:15: expected ',' or ')' after an argument of relu, found the line's end"},
      {p + "  %z = relu(%x) %y\n" + r, "3:17: expected nothing after the operator's ')', found '%'"},
      {p + "  %z = pad(%x, [1, a])\n" + r, "3:16: expected a list of numbers such as [1, 1], found '['"},
      {p + "  %z = gelu(%x, \"tanh)\n" + r, "3:23: expected \" at the text's end, found the line's end"},
      // Operators of match.
      {p + "  %z = reluu(%x)\n" + r, "3:8: there is no operator 'reluu' (did you mean 'relu'?)"},
      {p + "  %z = mine::nothing_of_the_kind(%x)\n" + r,
       "3:8: there is no operator 'mine::nothing_of_the_kind': load the library that defines it first"},
      {p + "  %z = relu_(%x)\n" + r, "3:8: write relu, without the underscore: it stands for both"},
      {p + "  %z = tsmem::act(%x, \"relu\", [1])\n" + r, "3:8: tsmem::act is put in by a rewrite"},
      {p + "  %z = linear(%x, %w)\n" + r, "3:8: linear takes 3 arguments (input, weight, bias), and 2 are given"},
      {p + "  %z = linear(%x, %w, %b, %c)\n" + r, "3:27: linear takes 3 arguments (input, weight, bias), and 4 are"},
      {p + "  %z = dropout(%x, 0.5, \"yes\")\n" + r, "3:25: dropout takes no \"yes\" for train, which is of type bool"},
      {p + "  %z, %i = linear(%x, %w, %b)\n" + r, "3:7: linear makes 1 value"},
      {p + "  %z = relu(%x, %y)\n" + r, "3:17: relu takes one argument, the tensor that it acts on"},
      {p + "  %z = leaky_relu(%x, %slope)\n" + r, "3:23: after the tensor leaky_relu takes its 1 number"},
      {p + "  %z = hardtanh(%x, 0)\n" + r, "3:8: after the tensor hardtanh takes its 2 numbers"},
      {p + "  %z = celu(%x)\n" + r, "3:8: celu is matched as elu"},
      {p + "  %z = add(%x, %y, 1)\n" + r, "3:8: add takes two arguments here, in either order"},
      {p + "  %z = mul(%x, true)\n" + r, "3:16: mul takes a tensor or a number here"},
      {p + "  %z = mul(2, 3)\n" + r, "3:8: mul needs a tensor such as %x"},
      {p + "  %z = act(%x, ACT)\n" + r, "3:16: act takes one argument, the tensor that it acts on"},
      {p + "  %z = pow(%x, ACT)\n" + r, "3:16: pow takes no ACT"},
      // Values of match.
      {p + "  %z = relu(%s)\n  %s = add(%x, %y)\n" + r, "4:3: %s is read before this line makes it"},
      {p + "  %z = add(%x, %y)\n  %z = relu(%z)\n" + r, "4:3: %z is made twice"},
      {p + "  %q = relu(%y)\n  %z = relu(%x)\n" + r, "3:3: the last line of match does not come from %q"},
      // rewrite.
      {m + "rewrite\n", "5:1: expected lines to put in the place of match, such as %z = mine::op(%x)"},
      {m + "rewrite\n  %q = mine::add_relu(%x, %y)\n", "6:3: %q is not what a line of match makes"},
      {m + "rewrite\n  %s = mine::add_relu(%x, %y)\n", "5:1: no line of rewrite makes %z, the result of match"},
      {m + "rewrite\n  %z = mine::add_reluu(%x, %y)\n",
       "6:8: there is no operator 'mine::add_reluu' (did you mean 'mine::add_relu'?)"},
      {m + "rewrite\n  %z = mine::add_relu(%x)\n", "6:8: mine::add_relu takes 2 arguments (x, y), and 1 is given"},
      {m + "rewrite\n  %z = mine::add_relu(%x, %y, ACT)\n",
       "6:31: mine::add_relu takes 2 arguments (x, y), and 3 are given"},
      {m + "rewrite\n  %z = mine::add_relu(%x, 1)\n", "6:27: mine::add_relu takes no 1 for y, which is of type Tensor"},
      {m + "rewrite\n  %z = mine::add_relu(%x, %w)\n", "6:27: neither match nor rewrite makes %w"},
      {m + "rewrite\n  %z = mine::scaled_relu(%s)\n",
       "6:26: %s is made inside match, and no line of rewrite before this one makes it"},
      {m + "rewrite\n  %z, %i = mine::add_relu(%x, %y)\n", "6:7: mine::add_relu makes 1 value, and 2 are named"},
      {m + "rewrite\n  %z = mine::halves(%x)\n", "6:3: mine::halves makes 2 values, and 1 is named"},
      {m + "rewrite\n  %z = mine::rank(%x)\n", "6:3: %z is a Tensor, and mine::rank makes a int here"},
      {m + "rewrite\n  %z = mine::wrong(%x)\n  %z = mine::wrong(%x)\n", "7:3: %z is made twice"},
      {p + "  %s = relu(%x)\n  %z = add(%s, %y)\nrewrite\n  %s = mine::add_relu(%x, %y)\n  %z = mine::wrong(%s)\n",
       "6:27: mine::add_relu is put where %s was made, and %y may not be there yet"},
      {m + "rewrite\n  %z = relu(%z)\n", "6:13: %z is made inside match, and no line of rewrite before this one"},
      // Lists of words.
      {m + r + "keeps %q\n", "7:7: %q is not a value of match"},
      {m + r + "keeps %x, y\n", "7:11: expected values such as %x after keeps, with commas between them"},
      {m + r + "keeps %x %y\n", "7:7: expected values such as %x after keeps, with commas between them"},
      {m + r + "shared %s\n", "7:8: %s is not a value that both match and rewrite make"},
      {m + r + "activations relu\n", "7:1: match has no line with act"},
      {p + "  %z = act(%x)\nrewrite\n  %z = mine::wrong(%x)\nactivations relu, reluu\n",
       "6:19: 'reluu' is not an activation here; there are: in-place, relu"},
      {m + r + "fed-by conv4d\n", "7:8: there is no operator 'conv4d' (did you mean 'conv"},
      {m + r + "sizes %z = mine::rank(%x)\n", "7:7: %z is not an inner value of match"},
      {m + r + "sizes %s = mine::rank(%x)\n", "7:12: mine::rank makes a int, and sizes are an int[]"},
      // What would go round in circles.
      {p + "  %z = relu(%x)\nrewrite\n  %z = relu(%x)\n",
       "4:1: the pattern would match its own replacement, again and again"},
      {p + "  %s = add(%x, %y)\n  %z = relu(%s)\nrewrite\n  %s = add(%y, %x)\n  %z = relu(%s)\n",
       "5:1: the pattern would match its own replacement, again and again"},
  };
  for (const auto& [text, expected] : table) {
    const std::string said = fault(text);
    EXPECT_NE(said.find(expected), said.npos) << text << "\nsaid: " << said << "\nexpected: " << expected;
  }
}

TEST(PatternFile, WhatIsNoTextIsToldSo) {
  EXPECT_THROW(tsmem::read_patterns("/nowhere/a.patterns"), tsmem::Error);
  EXPECT_THROW(tsmem::read_patterns("/"), tsmem::Error);
  EXPECT_THROW(patterns(std::string("pattern p\0", 10)), tsmem::Error);
  EXPECT_THROW(patterns(std::string(2 << 20, '\n')), tsmem::Error);
}

TEST(PatternFile, BuiltInPatternsFulfilTheirOwnLanguage) {
  for (const Pattern& p : tsmem::all_patterns())
    for (const tsmem::Rule& rule : p.rules) try {
        tsmem::check_rule(rule);
      } catch (const tsmem::PatternFault& f) {
        ADD_FAILURE() << p.name << ": " << f.part << " " << f.line << ":" << f.column << ": " << f.what << "\n"
                      << rule.match << "\n"
                      << rule.rewrite;
      }
}

TEST(PatternFile, OverlapsWithBuiltInPatternsAreTold) {
  const auto said = tsmem::pattern_overlaps(patterns(kAddRelu));
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0], "add-relu takes operators that bn-add-act, activation, add would take too; it goes before");
  EXPECT_TRUE(
      tsmem::pattern_overlaps(patterns("pattern p\nmatch\n  %z = erfinv(%x)\nrewrite\n  %z = mine::triple(%x)\n"))
          .empty());
}

TEST(PatternFile, OverlapsAmongOwnPatternsAreTold) {
  const auto one = [](const std::string& name, const std::string& from, const std::string& to) {
    return "pattern " + name + "\nmatch\n  %z = " + from + "(%x)\nrewrite\n  %z = " + to + "(%x)\n";
  };
  using S = std::vector<std::string>;
  EXPECT_EQ(tsmem::pattern_overlaps(patterns(one("p", "erfinv", "mine::triple") + one("q", "erfinv", "mine::wrong"))),
            S{"p takes operators that q would take too; it goes before"});
  EXPECT_EQ(tsmem::pattern_overlaps(patterns(one("p", "erfinv", "lgamma") + one("q", "lgamma", "erfinv"))),
            (S{"p matches what q puts in", "q matches what p puts in"}));
}

TEST(PatternFile, SavedAreTensorsAlone) {
  const auto p = patterns(
      "pattern p\nmatch\n  %a = leaky_relu(%x)\n  %z = softmax(%a, %dim, %dtype)\nrewrite\n"
      "  %z = softmax(%x, %dim, %dtype)\n");
  EXPECT_EQ(p[0].keeps, "x");
}

TEST(OwnPatterns, AnEmptyListIsWrittenAsOne) {
  Module m = net("def forward(self, x):\n    return torch.mean(x + self.w, [], False)\n");
  const auto report = rewrite_with(m,
                                   "pattern p\nmatch\n  %z = mean(%x, [], false, None)\nrewrite\n"
                                   "  %z = mine::triple(%x)\n");
  ASSERT_EQ(report.matches.size(), 1u);
  EXPECT_EQ(report.matches[0].pattern, "p");
}

TEST(PatternFile, PatternsOfAProgramAreCheckedToo) {
  const auto said = [](Pattern p) {
    Module m = net("def forward(self, x):\n    return torch.relu(x + self.w)\n");
    tsmem::RewriteOptions o;
    o.patterns = {std::move(p)};
    try {
      tsmem::rewrite(m, o);
    } catch (const tsmem::Error& e) {
      EXPECT_EQ(e.kind, tsmem::ErrorKind::request);
      return std::string(e.what());
    }
    return std::string();
  };
  Pattern p{.name = "mine", .algebra = "", .keeps = "", .conditions = "", .rules = {}};
  EXPECT_EQ(said(p), "Pattern mine: it has no rule");
  p.rules = {{.match = "%z = relu(%x)", .rewrite = "%z = mine::wrong(%y)"}};
  EXPECT_EQ(said(p), "Pattern mine: rewrite, line 1, column 18: neither match nor rewrite makes %y");
  p.name = "bn-act";
  EXPECT_NE(said(p).find("tsmem has a pattern 'bn-act' of its own"), std::string::npos);
}

TEST(OwnPatterns, GoBeforeTheBuiltInOnes) {
  Module m = net("def forward(self, x):\n    return torch.relu(self.w + x)\n");
  const Module original = reload(m);
  const auto report = rewrite_with(m, kAddRelu);
  ASSERT_EQ(report.matches.size(), 1u);
  EXPECT_EQ(report.matches[0].pattern + " " + report.matches[0].op, "add-relu mine::add_relu");
  FileCheck().check("mine::add_relu")->check_not("aten::relu")->run(graph(m));
  expect_same_numbers(original, m);
  ASSERT_TRUE(tsmem::restore(m));
  FileCheck().check("aten::relu")->check_not("mine::")->run(graph(m));
}

TEST(OwnPatterns, KeepWhatNobodyMayWriteTo) {
  const std::string later =
      "def forward(self, x):\n    y = x * 2\n    z = torch.relu(y + self.w)\n    y.add_(1)\n    return z + y\n";
  Module m = net(later);
  const auto report = rewrite_with(m, kAddRelu);
  EXPECT_TRUE(std::none_of(report.matches.begin(), report.matches.end(),
                           [](const auto& found) { return found.pattern == "add-relu"; }));
  ASSERT_FALSE(report.refused.empty());
  EXPECT_NE(report.refused[0].reason.find("writes to an input of the match later"), std::string::npos);
  Module other = net(later);
  EXPECT_EQ(rewrite_with(other, kAddRelu + "keeps nothing\n").matches[0].pattern, "add-relu");
}

TEST(OwnPatterns, NumbersAndNamedActivationsMatchOnlyThemselves) {
  const std::string text =
      "pattern p\nmatch\n  %a = leaky_relu(%x, 0.5)\n  %z = mul(3, %a)\nrewrite\n  %z = mine::triple(%x)\n";
  const auto count = [&](const std::string& expression) {
    Module m = net("def forward(self, x):\n    return " + expression + "\n");
    const auto report = rewrite_with(m, text);
    return std::count_if(report.matches.begin(), report.matches.end(),
                         [](const auto& found) { return found.pattern == "p"; });
  };
  EXPECT_EQ(count("torch.leaky_relu(x + self.w, 0.5) * 3"), 1);
  EXPECT_EQ(count("3.0 * torch.leaky_relu_(x + self.w, 0.5)"), 1);
  EXPECT_EQ(count("torch.leaky_relu(x + self.w, 0.25) * 3"), 0);
  EXPECT_EQ(count("torch.leaky_relu(x + self.w, 0.5) * 2"), 0);
  EXPECT_EQ(count("torch.relu(x + self.w) * 3"), 0);
  EXPECT_EQ(count("torch.leaky_relu(x + self.w, 0.5) * self.w"), 0);
}

TEST(OwnPatterns, DefaultsAreFilledInAndListsAreCompared) {
  Module m = net("def forward(self, x):\n    return torch.relu(torch.constant_pad_nd(x + self.w, [1, 1], 0.0))\n");
  const Module original = reload(m);
  const auto report = rewrite_with(m,
                                   "pattern p\nmatch\n  %a = constant_pad_nd(%x, [1, 1], 0)\n  %z = relu(%a)\n"
                                   "rewrite\n  %a = constant_pad_nd(%x, [1, 1])\n  %z = mine::scaled_relu(%a)\n");
  ASSERT_EQ(report.matches.size(), 1u);
  EXPECT_EQ(report.matches[0].op, "aten::constant_pad_nd + mine::scaled_relu");
  expect_same_numbers(original, m);
}

TEST(OwnPatterns, OperatorsOfOtherLibrariesAreMatched) {
  const std::string text =
      "pattern p\nmatch\n  %t = mine::triple(%x)\n  %z = relu(%t)\nrewrite\n  %z = mine::scaled_relu(%x, 3.0)\n";
  Module m = net("def forward(self, x):\n    return torch.relu(torch.neg(x + self.w))\n");
  const auto g = m.get_method("forward").graph();
  for (auto* n : std::vector<torch::jit::Node*>(g->nodes().begin(), g->nodes().end()))
    if (n->kind() == c10::aten::neg) {
      n->replaceWithNewSymbol(c10::Symbol::fromQualString("mine::triple"));
      n->destroy();
    }
  const Module original = reload(m);
  ASSERT_EQ(rewrite_with(m, text).matches.size(), 1u);
  FileCheck().check("mine::scaled_relu")->check_not("mine::triple")->run(graph(m));
  expect_same_numbers(original, m);
}

TEST(OwnPatterns, AValueOfAnotherTypeIsRefusedInWords) {
  Module m = net("def forward(self, x):\n    return torch.relu(torch.sum(x + self.w, dtype=None))\n");
  const auto report = rewrite_with(m,
                                   "pattern p\nmatch\n  %s = sum(%x, %type)\n  %z = relu(%s)\n"
                                   "rewrite\n  %z = mine::add_relu(%x, %type)\n");
  ASSERT_EQ(report.refused.size(), 1u);
  EXPECT_EQ(report.refused[0].reason, "mine::add_relu takes no y of type NoneType");
}
