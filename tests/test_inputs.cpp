#include "rewriter/measure/inputs.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "rewriter/error.h"

namespace tsmem {
namespace {

using c10::IValue;

std::vector<IValue> read(const std::vector<std::string>& specs, uint64_t seed = 0) {
  return make_inputs(specs, "", seed, "cpu");
}

// The error's text and exit code, or nothing.
std::pair<std::string, std::optional<ErrorKind>> failure(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return {e.what(), e.kind};
  }
  return {};
}

torch::jit::Module module(const std::string& source) {
  torch::jit::Module m("M");
  m.define(source);
  return m;
}

// A file as torch.save writes it, in a folder of its own that goes with it.
struct Saved {
  explicit Saved(const IValue& value) {
    char name[] = "/tmp/tsmem_inputs_XXXXXX";
    folder = mkdtemp(name);
    path = folder / "x.pt";
    auto bytes = torch::jit::pickle_save(value);
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  ~Saved() { std::filesystem::remove_all(folder); }
  std::filesystem::path folder, path;
};

TEST(Inputs, ShapesAndDtypes) {
  const std::vector<std::pair<std::string, at::ScalarType>> all = {
      {"2x3", at::kFloat},    {"2x3:f32", at::kFloat}, {"2x3:f64", at::kDouble}, {"2x3:bf16", at::kBFloat16},
      {"2x3:f16", at::kHalf}, {"2x3:i64", at::kLong},  {"2x3:i32", at::kInt},    {"2x3:i16", at::kShort},
      {"2x3:i8", at::kChar},  {"2x3:u8", at::kByte},   {"2x3:bool", at::kBool}};
  for (auto& [spec, dtype] : all) {
    auto t = read({spec})[0].toTensor();
    EXPECT_EQ(t.scalar_type(), dtype) << spec;
    EXPECT_EQ(t.sizes(), (at::IntArrayRef{2, 3})) << spec;
  }
  EXPECT_EQ(read({"7"})[0].toTensor().sizes(), at::IntArrayRef{7});
  EXPECT_EQ(read({"()"})[0].toTensor().dim(), 0);
  EXPECT_EQ(read({"0x4"})[0].toTensor().numel(), 0);
}

TEST(Inputs, Ranges) {
  auto t = read({"1000:i64[5,9)"})[0].toTensor();
  EXPECT_EQ(t.min().item<int64_t>(), 5);
  EXPECT_EQ(t.max().item<int64_t>(), 8);
  auto f = read({"1000[-2,-1.5)"})[0].toTensor();
  EXPECT_EQ(f.scalar_type(), at::kFloat);
  EXPECT_GE(f.min().item<double>(), -2);
  EXPECT_LT(f.max().item<double>(), -1.5);
  auto u = read({"1000:u8"})[0].toTensor();
  EXPECT_GT(u.max().item<int64_t>(), 200);
  EXPECT_EQ(read({"1000:i32"})[0].toTensor().max().item<int64_t>(), 1);
}

TEST(Inputs, Scalars) {
  auto v = read({"3:int", "-4:int", "0.5:float", "1e-3:float", "true:bool", "false:bool"});
  EXPECT_EQ(v[0].toInt(), 3);
  EXPECT_EQ(v[1].toInt(), -4);
  EXPECT_EQ(v[2].toDouble(), 0.5);
  EXPECT_EQ(v[3].toDouble(), 1e-3);
  EXPECT_TRUE(v[4].toBool());
  EXPECT_FALSE(v[5].toBool());
}

TEST(Inputs, SeedDecidesValues) {
  auto a = read({"64", "64"}, 1), b = read({"64", "64"}, 1), c = read({"64", "64"}, 2);
  EXPECT_TRUE(a[0].toTensor().equal(b[0].toTensor()));
  EXPECT_FALSE(a[0].toTensor().equal(c[0].toTensor()));
  EXPECT_FALSE(a[0].toTensor().equal(a[1].toTensor()));
  // Low precision rounds the same numbers.
  EXPECT_TRUE(read({"64:bf16"}, 1)[0].toTensor().equal(a[0].toTensor().to(at::kBFloat16)));
}

TEST(Inputs, UnreadableSpecSaysWhatOneLooksLike) {
  for (std::string bad : {"",
                          "x",
                          "2x",
                          "2xx3",
                          "ax3",
                          "-2x3",
                          "2x3:",
                          "2x3:f99",
                          "2x3:float",
                          "2x3:int",
                          "3.5:int",
                          "x:float",
                          "yes:bool",
                          "2x3:i64[3,3)",
                          "2x3:i64[5,3)",
                          "2x3:i64[0,3",
                          "2x3:i64[0.5,3)",
                          "2x3:u8[0,300)",
                          "2x3:u8[-1,3)",
                          "2x3:bool[0,1)",
                          "4:i8[-200,0)",
                          "@",
                          "[0,1)",
                          "99999999999999999999x2"}) {
    auto [text, code] = failure([&] { read({bad}); });
    EXPECT_EQ(code, ErrorKind::request) << bad;
    EXPECT_NE(text.find("can't be read"), std::string::npos) << bad << ": " << text;
    EXPECT_NE(text.find("8x3x224x224"), std::string::npos) << bad;
  }
}

TEST(Inputs, TooLargeForMemory) {
  for (std::string huge :
       {"99999999x99999999x99999", "1000000x1000000x1000:i64", "9000000000000000000x9000000000000000000"}) {
    auto [text, code] = failure([&] { read({huge}); });
    EXPECT_EQ(code, ErrorKind::input);
    EXPECT_NE(text.find("more memory than there is"), std::string::npos) << text;
  }
}

TEST(Inputs, Devices) {
  EXPECT_EQ(failure([] { make_inputs({"2"}, "", 0, "tpu"); }).second, ErrorKind::request);
  EXPECT_EQ(failure([] { make_inputs({"2"}, "", 0, "mps"); }).second, ErrorKind::request);
  if (!at::hasCUDA()) {
    auto [text, code] = failure([] { make_inputs({"2"}, "", 0, "cuda"); });
    if (code) {
      EXPECT_EQ(code, ErrorKind::request);
      EXPECT_NE(text.find("no CUDA device"), std::string::npos) << text;
    }
  }
}

TEST(Inputs, FilesKeepTheirNesting) {
  c10::impl::GenericDict d(c10::StringType::get(), c10::TensorType::get());
  d.insert("boxes", at::ones({1, 4}));
  Saved file(c10::ivalue::Tuple::create(at::ones({2}), d, IValue(), IValue(3)));
  auto one = read({"@" + file.path.string()});
  ASSERT_EQ(one.size(), 1u);
  EXPECT_TRUE(one[0].isTuple());
  auto all = make_inputs({}, "@" + file.path.string(), 0, "cpu");
  ASSERT_EQ(all.size(), 4u);
  EXPECT_TRUE(all[1].toGenericDict().at("boxes").toTensor().equal(at::ones({1, 4})));
  EXPECT_TRUE(all[2].isNone());
  EXPECT_EQ(all[3].toInt(), 3);
}

TEST(Inputs, BadFiles) {
  auto [missing, code] = failure([] { read({"@/no/such/file.pt"}); });
  EXPECT_EQ(code, ErrorKind::input);
  EXPECT_NE(missing.find("does not exist"), std::string::npos) << missing;
  EXPECT_NE(failure([] { read({"@/tmp"}); }).first.find("is not a file"), std::string::npos);
  Saved file(at::ones({2}));
  EXPECT_NE(
      failure([&] { make_inputs({}, "@" + file.path.string(), 0, "cpu"); }).first.find("a tuple of all arguments"),
      std::string::npos);
  std::filesystem::resize_file(file.path, std::filesystem::file_size(file.path) / 2);
  auto [cut, cut_code] = failure([&] { read({"@" + file.path.string()}); });
  EXPECT_EQ(cut_code, ErrorKind::input);
  EXPECT_NE(cut.find("is damaged"), std::string::npos) << cut;
  std::ofstream(file.path) << "no zip";
  EXPECT_NE(failure([&] { read({"@" + file.path.string()}); }).first.find("torch.save"), std::string::npos);
}

TEST(CheckInputs, CountsAndNames) {
  auto m = module("def forward(self, x, n: int, y: Optional[Tensor] = None):\n  return x\n");
  EXPECT_EQ(check_inputs(m, "forward", {at::ones(1), 3}).size(), 2u);
  EXPECT_EQ(check_inputs(m, "forward", {at::ones(1), 3, IValue()}).size(), 3u);
  for (auto n : {0, 1, 4}) {
    auto [text, code] = failure([&] { check_inputs(m, "forward", std::vector<IValue>(n, at::ones(1))); });
    EXPECT_EQ(code, ErrorKind::input);
    EXPECT_NE(text.find("forward takes 3 arguments (x: Tensor, n: int, y: Optional[Tensor] (optional))"),
              std::string::npos)
        << text;
  }
  auto [text, code] = failure([&] { check_inputs(m, "forwrd", {}); });
  EXPECT_EQ(code, ErrorKind::request);
  EXPECT_NE(text.find("no method 'forwrd'"), std::string::npos) << text;
  EXPECT_NE(text.find("forward"), std::string::npos);
}

TEST(CheckInputs, ConvertsToTheSchema) {
  auto m = module(R"(
def forward(self, images: List[Tensor], targets: Optional[List[Dict[str, Tensor]]], scale: float, pair: Tuple[Tensor, int], any: Any):
  n = len(images)
  if targets is not None:
    for t in targets:
      n += len(t)
  return images[0] * scale * pair[1], n
)");
  c10::impl::GenericDict d(c10::AnyType::get(), c10::AnyType::get());
  d.insert("boxes", at::ones({1, 4}));
  c10::impl::GenericList targets(c10::AnyType::get());
  targets.push_back(d);
  auto images = c10::ivalue::Tuple::create(at::ones(2), at::ones(3));
  auto got = check_inputs(m, "forward", {images, targets, 2, c10::ivalue::Tuple::create(at::ones(1), 5), 7});
  EXPECT_TRUE(got[0].isTensorList());
  EXPECT_EQ(got[1].type()->annotation_str(), "List[Dict[str, Tensor]]");
  EXPECT_TRUE(got[2].isDouble());
  auto out = m.forward(got).toTupleRef().elements();
  EXPECT_TRUE(out[0].toTensor().equal(at::full(2, 10)));
  EXPECT_EQ(out[1].toInt(), 3);
}

TEST(CheckInputs, WrongTypesAreNamed) {
  auto m = module("def forward(self, xs: List[Dict[str, Tensor]], p: Tuple[Tensor, int]):\n  return p[0]\n");
  c10::impl::GenericDict d(c10::AnyType::get(), c10::AnyType::get());
  d.insert("k", 3);
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(d);
  auto pair = c10::ivalue::Tuple::create(at::ones(1), 5);
  auto text = failure([&] { check_inputs(m, "forward", {list, pair}); }).first;
  EXPECT_NE(text.find("argument 'xs'[0]['k'] wants Tensor and got an int"), std::string::npos) << text;
  text = failure([&] { check_inputs(m, "forward", {at::ones(1), pair}); }).first;
  EXPECT_NE(text.find("argument 'xs' wants List[Dict[str, Tensor]] and got a tensor"), std::string::npos) << text;
  list.clear();
  text = failure([&] { check_inputs(m, "forward", {list, c10::ivalue::Tuple::create(at::ones(1))}); }).first;
  EXPECT_NE(text.find("wants 2 elements"), std::string::npos) << text;
}

TEST(Values, FloatingTensorsInOrder) {
  c10::impl::GenericDict d(c10::StringType::get(), c10::TensorType::get());
  d.insert("b", at::full(1, 2));
  d.insert("a", at::full(1, 1));
  auto v = c10::ivalue::Tuple::create(
      at::full(1, 0.f), d, c10::List<at::Tensor>({at::full(1, 3.f), at::ones(1, at::kLong)}), IValue(), IValue(5));
  // at::full with an int gives int64, which is not of floating point.
  EXPECT_EQ(floating_tensors(v).size(), 2u);
  d.insert_or_assign("a", at::full(1, 1.f));
  d.insert_or_assign("b", at::full(1, 2.f));
  auto t = floating_tensors(v);
  ASSERT_EQ(t.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(t[i].item<float>(), i);
}

TEST(Values, CotangentsAreExactInEveryDtype) {
  auto f = cotangents({at::ones({3, 5})}, 4)[0], d = cotangents({at::ones({3, 5}, at::kDouble)}, 4)[0],
       b = cotangents({at::ones({3, 5}, at::kBFloat16)}, 4)[0];
  EXPECT_TRUE(f.to(at::kDouble).equal(d));
  EXPECT_TRUE(b.to(at::kDouble).equal(d));
}

TEST(Values, LossIsTheSumOfProducts) {
  auto x = at::randn({4}), y = at::randn({2, 2});
  auto c = cotangents({x, y}, 9);
  auto loss = loss_of(c10::ivalue::Tuple::create(x, y, at::ones(3, at::kLong)), 9);
  EXPECT_FLOAT_EQ(loss.item<float>(), ((x * c[0]).sum() + (y * c[1]).sum()).item<float>());
  EXPECT_EQ(failure([] { loss_of(at::ones(2, at::kLong), 0); }).second, ErrorKind::input);
}

TEST(Values, CloneIsDeepAndCasts) {
  auto x = at::ones(2), n = at::ones(2, at::kLong);
  auto copy = clone_value(c10::List<at::Tensor>({x, n}), at::kDouble).toTensorVector();
  x.zero_();
  EXPECT_TRUE(copy[0].equal(at::ones(2, at::kDouble)));
  EXPECT_EQ(copy[1].scalar_type(), at::kLong);
}

}  // namespace
}  // namespace tsmem
