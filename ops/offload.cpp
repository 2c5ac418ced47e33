#include "offload.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <thread>

#include "common.h"
#include "known.h"
#include "recipe.h"
#include "registration.h"
#include "simulated_link.h"

namespace tsmem {

using at::Tensor;
using Clock = std::chrono::steady_clock;

namespace {

// Tensors that are under way at once in either direction. With one, a large tensor after small ones would be waited
// for; more would take memory.
constexpr size_t kUnderWay = 2;

// A copy that was begun.
struct Transfer {
  std::optional<c10::Event> event;  // on a device
  Clock::time_point end;            // simulated
};

struct Offloaded {
  Tensor here;       // on the device, until it has left
  Tensor host;       // undefined for tensors without data
  Tensor back;       // on the device again, from when it is fetched until it is used
  Transfer out, in;  // of `here` and `back`
  at::TensorOptions options;
  c10::DimVector sizes, strides;
  std::optional<c10::Stream> stream;  // forward's, which is backward's too
  std::weak_ptr<Offloaded> previous;  // the one that was offloaded before
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t version = 0;
  int64_t number = 0;
  bool used = false;  // in the pass of backward that runs

  Offloaded() = default;
  Offloaded(const Offloaded&) = delete;
  Offloaded& operator=(const Offloaded&) = delete;
  ~Offloaded();
};

// One direction of a device's link to the host.
struct Lane {
  std::optional<c10::Stream> stream;  // none: simulated
  Clock::time_point free{};           // simulated: when the last copy ends
};

struct Link {
  Lane out, in;
  std::deque<std::weak_ptr<Offloaded>> leaving, coming;  // that are on the device yet, and again
  std::weak_ptr<Offloaded> last;
  int64_t count = 0;
};

// Recursive: a tensor that is freed may be an offloaded one's last user.
std::recursive_mutex mutex;
double bytes_per_second = 0;      // simulated
std::vector<std::string> events;  // simulated: what happened, in order
std::map<c10::Device, Link, bool (*)(const c10::Device&, const c10::Device&)> links([](const c10::Device& a,
                                                                                       const c10::Device& b) {
  return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
});

bool simulated(c10::Device device) { return device.is_cpu() || device.is_meta(); }

Link& link_of(c10::Device device) {
  const auto [found, made] = links.try_emplace(device);
  if (made && !simulated(device)) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    found->second.out.stream = guard.getStreamFromGlobalPool(device);
    found->second.in.stream = guard.getStreamFromGlobalPool(device);
  }
  return found->second;
}

void note_event(const char* what, const Offloaded& o) {
  if (simulated(o.options.device())) events.push_back(std::string(what) + " " + std::to_string(o.number));
}

// Copies on the lane, after what `stream` has been given to do, and after `before`.
Transfer copy(Lane& lane, const std::optional<c10::Stream>& stream, Transfer* before, Tensor& to, const Tensor& from) {
  Transfer t;
  if (lane.stream) {
    c10::Event ready(stream->device_type());
    ready.record(*stream);
    ready.block(*lane.stream);
    if (before && before->event) before->event->block(*lane.stream);
    const c10::StreamGuard guard(*lane.stream);
    to.copy_(from, /*non_blocking=*/true);
    t.event.emplace(stream->device_type());
    t.event->record(*lane.stream);
    return t;
  }
  const bool data = to.defined() && from.defined();
  if (data) to.copy_(from);
  const auto now = Clock::now();
  if (!data || bytes_per_second <= 0) return {std::nullopt, now};
  const std::chrono::duration<double> takes(static_cast<double>(from.nbytes()) / bytes_per_second);
  lane.free = std::max(std::max(lane.free, before ? before->end : now), now) +
              std::chrono::duration_cast<Clock::duration>(takes);
  t.end = lane.free;
  return t;
}

// What the stream is given from now on comes after the copy.
void wait(const Offloaded& o, const Transfer& t) {
  if (t.event)
    t.event->block(*o.stream);
  else
    std::this_thread::sleep_until(t.end);
}

// It is on the host now; its memory may be used for what the stream does next.
void leave(Offloaded& o) {
  if (!o.here.defined()) return;
  wait(o, o.out);
  note_event("left", o);
  o.here.reset();
}

Tensor host_memory(const Offloaded& o, size_t bytes) {
  if (o.options.device().is_meta()) return {};
  const auto options = o.options.device(at::kCPU);
  if (!simulated(o.options.device())) return at::empty_strided(o.sizes, o.strides, options.pinned_memory(true));
  void* memory = std::malloc(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, memory, "tsmem: no memory on the host for an output of ", bytes, " bytes");
  return at::from_blob(
      memory, o.sizes, o.strides, [](void* m) { std::free(m); }, options);
}

void drop_fetched(Offloaded& o) {
  if (!o.back.defined()) return;
  wait(o, o.in);
  note_event("dropped", o);
  o.back.reset();
}

void fetch(const std::shared_ptr<Offloaded>& o) {
  if (o->here.defined() || o->back.defined()) return;
  Link& link = link_of(o->options.device());
  const c10::OptionalStreamGuard guard(o->stream);
  o->back = at::empty_strided(o->sizes, o->strides, o->options);
  o->in = copy(link.in, o->stream, &o->out, o->back, o->host);
  note_event("fetch", *o);
  link.coming.push_back(o);
}

// Those that come after `number` in forward: backward has gone by them.
void pass_by(std::deque<std::weak_ptr<Offloaded>>& all, int64_t number, void (*drop)(Offloaded&)) {
  std::erase_if(all, [&](const std::weak_ptr<Offloaded>& weak) {
    const auto one = weak.lock();
    if (one && one->number > number) drop(*one);
    return !one || one->number > number;
  });
}

// Where the pass of backward ends, be it before a use.
void forget_pass(const std::shared_ptr<Offloaded>& o) {
  when_pass_ends([weak = std::weak_ptr<Offloaded>(o)] {
    const std::lock_guard lock(mutex);
    const auto one = weak.lock();
    if (!one) return;
    one->used = false;
    pass_by(link_of(one->options.device()).coming, -1, drop_fetched);
  });
}

// The tensor on the device; those that backward needs after it are fetched meanwhile.
Tensor use(const std::shared_ptr<Offloaded>& o) {
  const std::lock_guard lock(mutex);
  TORCH_CHECK(o->counter.current_version() == o->version,
              "one of the variables needed for gradient computation has been modified by an inplace operation: an "
              "output of shape ",
              at::IntArrayRef(o->sizes), " that was offloaded to the host's memory is at version ",
              o->counter.current_version(), "; expected version ", o->version, " instead");
  Link& link = link_of(o->options.device());
  pass_by(link.leaving, o->number, leave);
  pass_by(link.coming, o->number, drop_fetched);
  Tensor result = o->here;
  if (!result.defined()) {
    fetch(o);
    wait(*o, o->in);
    result = std::move(o->back);
  }
  note_event("use", *o);
  o->used = true;
  forget_pass(o);
  auto next = o->previous.lock();
  for (size_t ahead = 0; next && ahead < kUnderWay; next = next->previous.lock()) {
    if (next->stream != o->stream || next->used) continue;
    fetch(next);
    ++ahead;
  }
  return result;
}

Offloaded::~Offloaded() {
  if (!here.defined() && !back.defined()) return;
  try {
    const std::lock_guard lock(mutex);
    if (here.defined()) wait(*this, out);
    if (back.defined()) wait(*this, in);
  } catch (const std::exception&) {
    // The device has gone: the process ends.
  }
}

bool may_offload(const Tensor& t) {
  const bool real =
      plain(t) && t.has_storage() && !t.is_inference() &&
      !t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
  if (!real || !t.is_non_overlapping_and_dense()) return false;
  if (torch::autograd::get_current_graph_task_id() != -1) return false;
  if (simulated(t.device())) return simulated_link() > 0;
  return t.is_cuda() && graph_offset(t) < 0;
}

}  // namespace

Make offloaded(const Tensor& output) {
  if (!may_offload(output)) return nullptr;
  const Below below;
  const std::lock_guard lock(mutex);
  const auto o = std::make_shared<Offloaded>();
  o->here = output.detach();
  o->options = output.options();
  o->sizes = c10::DimVector(output.sizes());
  o->strides = c10::DimVector(output.strides());
  o->stream = stream_of(output);
  o->counter = output.unsafeGetTensorImpl()->version_counter();
  o->version = static_cast<uint32_t>(output._version());
  o->host = host_memory(*o, output.nbytes());
  Link& link = link_of(output.device());
  o->number = link.count++;
  o->previous = link.last;
  link.last = o;
  o->out = copy(link.out, o->stream, nullptr, o->host, o->here);
  note_event("offload", *o);
  link.leaving.push_back(o);
  while (link.leaving.size() > kUnderWay) {
    if (const auto first = link.leaving.front().lock()) leave(*first);
    link.leaving.pop_front();
  }
  return [o](std::vector<Tensor>&, const std::vector<bool>&) { return use(o); };
}

void simulate_link(double speed) {
  const std::lock_guard lock(mutex);
  bytes_per_second = speed;
  events.clear();
  for (auto& [device, link] : links)
    if (simulated(device)) link = Link();
}

double simulated_link() {
  const std::lock_guard lock(mutex);
  return bytes_per_second;
}

static std::vector<std::string> link_events() {
  const std::lock_guard lock(mutex);
  return std::exchange(events, {});
}

void register_offload(torch::Library& m) {
  m.def("_simulate_link(float bytes_per_second) -> ()", [](double speed) {
    TORCH_CHECK(speed >= 0, "tsmem::_simulate_link: bytes a second, or 0 for none");
    simulate_link(speed);
  });
  m.def("_link_events() -> str[]", TORCH_FN(link_events));
}

}  // namespace tsmem
