#include "cuda/cudnn_plans.h"

#include <dlfcn.h>

#include <mutex>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace tsmem::cuda {

namespace fe = cudnn_frontend;

struct FusedPlan {
  mutable std::mutex mutex;  // not all engines may be run by two threads at once
  fe::graph::Graph graph;
  int64_t workspace = 0;
  std::string engine;
};

namespace {

enum Id : int64_t { kX = 1, kScale, kShift, kOther, kResult, kSum, kSquares };

// Of a dense tensor with its channels innermost.
std::vector<int64_t> channels_last_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  strides[1] = 1;
  int64_t next = sizes[1];
  for (size_t d = sizes.size() - 1; d > 1; --d) strides[d] = next, next *= sizes[d];
  strides[0] = next;
  return strides;
}

auto attributes(Id id, const std::vector<int64_t>& sizes) {
  return fe::graph::Tensor_attributes().set_uid(id).set_dim(sizes).set_stride(channels_last_strides(sizes));
}

void set_window(auto& attributes, const FusedConv& conv) {
  attributes.set_pre_padding(conv.padding)
      .set_post_padding(conv.padding)
      .set_stride(conv.stride)
      .set_dilation(conv.dilation);
}

void describe(fe::graph::Graph& g, FusedGraph graph, const FusedConv& conv) {
  const auto io = conv.dtype == Dtype::bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF;
  g.set_io_data_type(io).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  std::vector<int64_t> of_channels(conv.input.size(), 1), of_filters = of_channels;
  of_channels[1] = conv.input[1], of_filters[1] = conv.weight[0];
  const auto pointwise = [](fe::PointwiseMode_t mode) { return fe::graph::Pointwise_attributes().set_mode(mode); };
  const auto x = g.tensor(attributes(kX, conv.input));
  const auto scaled = g.pointwise(x, g.tensor(attributes(kScale, of_channels)), pointwise(fe::PointwiseMode_t::MUL));
  const auto shifted =
      g.pointwise(scaled, g.tensor(attributes(kShift, of_channels)), pointwise(fe::PointwiseMode_t::ADD));
  const auto activated = g.pointwise(shifted, pointwise(fe::PointwiseMode_t::RELU_FWD));
  std::shared_ptr<fe::graph::Tensor_attributes> result;
  if (graph == FusedGraph::convolution) {
    fe::graph::Conv_fprop_attributes window;
    set_window(window, conv);
    result = g.conv_fprop(activated, g.tensor(attributes(kOther, conv.weight)), window);
    result->set_dim(conv.output).set_stride(channels_last_strides(conv.output));
    const auto [sum, squares] = g.genstats(result, fe::graph::Genstats_attributes());
    for (const auto& [id, t] : {std::pair{kSum, sum}, std::pair{kSquares, squares}})
      t->set_output(true)
          .set_uid(id)
          .set_data_type(fe::DataType_t::FLOAT)
          .set_dim(of_filters)
          .set_stride(channels_last_strides(of_filters));
  } else {
    fe::graph::Conv_wgrad_attributes window;
    set_window(window, conv);
    result = g.conv_wgrad(g.tensor(attributes(kOther, conv.output)), activated, window);
    result->set_dim(conv.weight).set_stride(channels_last_strides(conv.weight));
  }
  result->set_output(true).set_uid(kResult).set_data_type(io);
}

// The same from start to end: the first step that fails ends it.
fe::error_t build(FusedPlan& plan, FusedGraph graph, const FusedConv& conv, const PlanFor& device) {
  fe::graph::Graph& g = plan.graph;
  describe(g, graph, conv);
  if (!device.handle) {
    const auto properties = std::make_shared<fe::DeviceProperties>();
    if (auto e = properties->deserialize({device.description.begin(), device.description.end()}); e.is_bad()) return e;
    g.set_device_properties(properties);
    g.set_sm_version(device.sm);
  }
  if (auto e = g.validate(); e.is_bad()) return e;
  if (auto e = device.handle ? g.build_operation_graph(device.handle) : g.build_operation_graph(); e.is_bad()) return e;
  if (auto e = g.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}); e.is_bad()) return e;
  if (auto e = g.check_support(); e.is_bad()) return e;
  if (auto e = g.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE); e.is_bad()) return e;
  if (auto e = g.get_workspace_size(plan.workspace); e.is_bad()) return e;
  return g.get_plan_name(plan.engine);
}

}  // namespace

std::string load_cudnn(const std::string& library) {
  if (!fe::cudnn_dlhandle) fe::cudnn_dlhandle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  return fe::cudnn_dlhandle ? "" : dlerror();
}

FusedPlanPtr build_plan(FusedGraph graph, const FusedConv& conv, const PlanFor& device, std::string& why) {
  auto plan = std::make_shared<FusedPlan>();
  try {
    fe::error_t error = build(*plan, graph, conv, device);
    if (error.is_good()) return plan;
    why = error.get_message();
  } catch (const std::exception& e) {
    why = e.what();
  }
  return nullptr;
}

int64_t workspace_bytes(const FusedPlan& plan) { return plan.workspace; }
std::string engine_name(const FusedPlan& plan) { return plan.engine; }

std::string run_plan(const FusedPlan& plan, cudnnContext* handle, const FusedOperands& operands) {
  const auto at = [](const void* p) { return const_cast<void*>(p); };
  std::unordered_map<int64_t, void*> pack{{kX, at(operands.x)},
                                          {kScale, at(operands.scale)},
                                          {kShift, at(operands.shift)},
                                          {kOther, at(operands.other)},
                                          {kResult, operands.result}};
  if (operands.sums[0]) pack.insert({{kSum, operands.sums[0]}, {kSquares, operands.sums[1]}});
  const std::lock_guard<std::mutex> lock(plan.mutex);
  try {
    fe::error_t error = plan.graph.execute(handle, pack, operands.workspace);
    return error.is_good() ? "" : error.get_message();
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace tsmem::cuda
