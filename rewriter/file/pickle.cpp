#include "rewriter/file/pickle.h"

#include <c10/core/QScheme.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <vector>

namespace tsmem {
namespace {

struct Fault {
  std::string why;
};

[[noreturn]] void inconsistent() { throw Fault{"a pickle in it is inconsistent"}; }
[[noreturn]] void too_short() { throw Fault{"a pickle in it ends too early"}; }

enum class Kind : uint8_t { other, integer, string, tuple, container, tensor };

// What stands for a value. `number` is an integer's value or the place of a string; `at` a string's size, or the place
// of a tuple, list, dict or object among the nodes, or of a tensor among the tensors.
struct Value {
  Kind kind = Kind::other;
  uint32_t at = 0;
  int64_t number = 0;
};

struct Node {
  std::vector<Value> items;  // of a tuple or list
  uint32_t depth = 1;
  uint64_t weight = 1;   // values that one meets who looks at all of it, shared ones each time
  bool fetched = false;  // somebody holds it besides the stack
};

struct Tensor {
  std::string record;
  int64_t bytes = 0;  // of its storage
  int dtype = 0;
  std::vector<int64_t> sizes;
};

// What a GLOBAL stands for when it is called.
enum class Function : uint8_t { other, tensor, quantized, from_type, parameter, same, first, drop, type_tag };

constexpr int64_t kMost = int64_t{1} << 62;
constexpr uint64_t kManyValues = 50'000'000;

// How many elements of a dtype lie in one byte.
int64_t elements_in_byte(int dtype) {
  switch (static_cast<c10::ScalarType>(dtype)) {
    case c10::ScalarType::QUInt4x2:
      return 2;
    case c10::ScalarType::QUInt2x4:
      return 4;
    default:
      return 1;
  }
}

int64_t element_size(int dtype) { return static_cast<int64_t>(c10::elementSize(static_cast<c10::ScalarType>(dtype))); }

// The number that a class of module torch stands for: a dtype's, or a quantization scheme's.
std::optional<int64_t> torch_number(std::string_view name) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::Undefined); ++i)
    if (name == std::string(c10::toString(static_cast<c10::ScalarType>(i))) + "Storage") return i;
  for (int i = 0; i < c10::COMPILE_TIME_NUM_QSCHEMES; ++i)
    if (name == c10::toString(static_cast<c10::QScheme>(i))) return i;
  return {};
}

struct Walker {
  Walker(std::string_view text, const StorageBytes& bytes, bool is_debug)
      : pickle(text), storage_bytes(bytes), debug(is_debug) {}

  std::string_view pickle;
  const StorageBytes& storage_bytes;
  bool debug;
  size_t at = 0;
  std::vector<Value> stack, memo;
  std::vector<size_t> marks;
  std::vector<Node> nodes;
  std::vector<Tensor> tensors;
  std::vector<Function> functions;
  int skip_globals = 0;  // 2 after _rebuild_from_type_v2, whose next GLOBALs are its arguments

  uint64_t number(int bytes) {
    if (pickle.size() - at < static_cast<size_t>(bytes)) too_short();
    uint64_t n = 0;
    for (int i = bytes - 1; i >= 0; --i) n = n << 8 | static_cast<unsigned char>(pickle[at + static_cast<size_t>(i)]);
    at += static_cast<size_t>(bytes);
    return n;
  }
  std::string_view text(uint64_t size) {
    if (pickle.size() - at < size) too_short();
    at += size;
    return pickle.substr(at - size, size);
  }
  std::string_view line() {
    const size_t end = pickle.find('\n', at);
    if (end == pickle.npos) too_short();
    const auto found = pickle.substr(at, end - at);
    at = end + 1;
    return found;
  }
  std::string_view string(const Value& v) const {
    if (v.kind != Kind::string) inconsistent();
    return pickle.substr(static_cast<size_t>(v.number), v.at);
  }
  const std::vector<Value>& tuple(const Value& v) const {
    if (v.kind != Kind::tuple) inconsistent();
    return nodes[v.at].items;
  }
  const Value& item(const Value& of, size_t i) const {
    const auto& items = tuple(of);
    if (i >= items.size()) inconsistent();
    return items[i];
  }
  static int64_t integer(const Value& v) {
    if (v.kind != Kind::integer) inconsistent();
    return v.number;
  }
  Tensor& tensor(const Value& v) {
    if (v.kind != Kind::tensor) inconsistent();
    return tensors[v.at];
  }
  bool has_node(const Value& v) const { return v.kind == Kind::tuple || v.kind == Kind::container; }

  void push(Kind kind, int64_t number = 0, uint32_t place = 0) { stack.push_back({kind, place, number}); }
  void push_string(uint64_t size) {
    const size_t begin = at;
    text(size);
    push(Kind::string, static_cast<int64_t>(begin), static_cast<uint32_t>(size));
  }
  // Below a MARK nothing is taken but by what the MARK is for.
  void need(size_t n) const {
    if (stack.size() - (marks.empty() ? 0 : marks.back()) < n) inconsistent();
  }
  Value pop() {
    need(1);
    const Value v = stack.back();
    stack.pop_back();
    return v;
  }
  std::vector<Value> pop_to_mark() {
    if (marks.empty()) inconsistent();
    const auto begin = stack.begin() + static_cast<std::ptrdiff_t>(marks.back());
    marks.pop_back();
    std::vector<Value> items(begin, stack.end());
    stack.erase(begin, stack.end());
    return items;
  }
  std::vector<Value> pop_some(size_t n) {
    need(n);
    std::vector<Value> items(stack.end() - static_cast<std::ptrdiff_t>(n), stack.end());
    stack.resize(stack.size() - n);
    return items;
  }

  void put_into(Node& node, const std::vector<Value>& items) {
    for (const Value& v : items) {
      if (!has_node(v)) {
        ++node.weight;
        continue;
      }
      node.depth = std::max(node.depth, nodes[v.at].depth + 1);
      node.weight = std::min(node.weight + nodes[v.at].weight, uint64_t{1} << 60);
    }
    if (node.depth > kDeepestPickle)
      throw Fault{"a pickle in it nests more than " + std::to_string(kDeepestPickle) + " values in one another"};
    // In places in the source every line's place holds the whole text, which PyTorch makes once.
    if (!debug && node.weight > kManyValues + 16 * pickle.size())
      throw Fault{"a pickle in it stands for more values than its size explains"};
  }
  void push_container(Kind kind, std::vector<Value> items) {
    Node node;
    put_into(node, items);
    node.items = std::move(items);
    nodes.push_back(std::move(node));
    push(kind, 0, static_cast<uint32_t>(nodes.size() - 1));
  }
  // Onto the list or dict on top of the stack. What others hold already must not change any more: so it could come to
  // contain itself.
  void put_on_top(std::vector<Value> items, bool pairs) {
    if (stack.empty() || (pairs && items.size() % 2 != 0)) inconsistent();
    const Value to = stack.back();
    if (to.kind != Kind::container) {
      // An OrderedDict, which the unpickler takes for None, and refuses here by itself.
      return;
    }
    if (nodes[to.at].fetched) throw Fault{"a pickle in it has a value that contains itself"};
    put_into(nodes[to.at], items);
    auto& have = nodes[to.at].items;
    have.insert(have.end(), items.begin(), items.end());
  }

  void put_memo(uint64_t id) {
    // Entries are numbered one by one, each by an opcode of its own.
    if (id > pickle.size()) throw Fault{"a pickle in it asks for too large a table"};
    if (stack.empty()) inconsistent();
    if (id >= memo.size()) memo.resize(id + 1);
    memo[id] = stack.back();
  }
  void get_memo(uint64_t id) {
    if (id >= memo.size()) inconsistent();
    stack.push_back(memo[id]);
    if (has_node(memo[id])) nodes[memo[id].at].fetched = true;
  }

  // ("storage", dtype, key, device, count): a tensor of the whole storage.
  void storage() {
    const Value args = pop();
    if (string(item(args, 0)) != "storage") inconsistent();
    const int64_t dtype = integer(item(args, 1)), count = integer(item(args, 4));
    string(item(args, 3));
    Tensor t;
    t.record = string(item(args, 2));
    if (dtype < 0 || dtype >= static_cast<int64_t>(c10::ScalarType::Undefined))
      throw Fault{"the tensor record '" + t.record + "' is of an unknown dtype"};
    t.dtype = static_cast<int>(dtype);
    if (count < 0 || count > kMost / element_size(t.dtype))
      throw Fault{"the tensor record '" + t.record + "' has an impossible number of elements"};
    t.bytes = count * element_size(t.dtype);
    if (count > 0) {
      const auto found = storage_bytes ? storage_bytes(t.record) : std::nullopt;
      if (!found) throw Fault{"the tensor record '" + t.record + "' is missing"};
      if (*found < static_cast<uint64_t>(t.bytes))
        throw Fault{"the tensor record '" + t.record + "' has " + std::to_string(*found) +
                    " bytes, and its tensors take " + std::to_string(t.bytes)};
    }
    t.sizes = {count};
    push_tensor(std::move(t));
  }
  void push_tensor(Tensor t) {
    tensors.push_back(std::move(t));
    push(Kind::tensor, 0, static_cast<uint32_t>(tensors.size() - 1));
  }

  // (storage, offset, sizes, strides, [quantization,] requires_grad, hooks [, metadata]).
  void rebuild_tensor(const Value& args, bool quantized) {
    if (tuple(args).size() < (quantized ? 7u : 6u)) inconsistent();
    Tensor t = tensor(item(args, 0));
    const int64_t offset = integer(item(args, 1));
    const auto &sizes = tuple(item(args, 2)), &strides = tuple(item(args, 3));
    const auto wrong = [&](const char* why) { return Fault{"a tensor in record '" + t.record + "' " + why}; };
    if (sizes.size() != strides.size()) throw wrong("has sizes and strides of different numbers");
    if (offset < 0) throw wrong("begins before its record");
    t.sizes.clear();
    __int128 last = offset, count = 1;
    bool empty = false;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t size = integer(sizes[i]), stride = integer(strides[i]);
      if (size < 0 || stride < 0) throw wrong("has a negative size or stride");
      empty |= size == 0;
      if (size > 0) {
        count *= size;
        last += static_cast<__int128>(size - 1) * stride;
      }
      if (count > kMost / element_size(t.dtype) || last > kMost) throw wrong("is larger than any memory");
      t.sizes.push_back(size);
    }
    const int64_t in_byte = elements_in_byte(t.dtype);
    if (!empty && (last / in_byte + 1) * element_size(t.dtype) > t.bytes) throw wrong("reaches beyond it");
    if (quantized) check_quantized(item(args, 4), t);
    push_tensor(std::move(t));
  }

  void check_quantized(const Value& parameters, const Tensor& t) {
    const int64_t scheme = integer(item(parameters, 0));
    if (scheme != static_cast<int64_t>(c10::kPerChannelAffine) &&
        scheme != static_cast<int64_t>(c10::kPerChannelAffineFloatQParams))
      return;
    const int64_t axis = integer(item(parameters, 3));
    const bool inside = axis >= 0 && axis < static_cast<int64_t>(t.sizes.size());
    for (size_t i : {1u, 2u}) {
      const auto& values = tensor(item(parameters, i)).sizes;
      if (!inside || values.size() != 1 || values[0] != t.sizes[static_cast<size_t>(axis)])
        throw Fault{"a quantized tensor in record '" + t.record + "' has other channels than scales"};
    }
  }

  void call(int64_t index, const Value& argument) {
    if (index < 0 || index >= static_cast<int64_t>(functions.size())) inconsistent();
    switch (functions[static_cast<size_t>(index)]) {
      case Function::tensor:
        return rebuild_tensor(argument, false);
      case Function::quantized:
        return rebuild_tensor(argument, true);
      case Function::from_type:
        item(argument, 3);
        if (functions.size() <= static_cast<size_t>(index) + 1 ||
            functions[static_cast<size_t>(index) + 1] == Function::from_type)
          inconsistent();
        return call(index + 1, item(argument, 2));
      case Function::parameter:
        tensor(item(argument, 0));
        stack.push_back(item(argument, 0));
        return;
      case Function::first:
        stack.push_back(item(argument, 0));
        return;
      case Function::type_tag: {
        size_t depth = 0, deepest = 0;
        for (char c : string(item(argument, 1))) {
          if (c == '[' || c == '(') deepest = std::max(deepest, ++depth);
          if ((c == ']' || c == ')') && depth > 0) --depth;
        }
        if (deepest > kDeepestPickle)
          throw Fault{"a pickle in it names a type that nests more than " + std::to_string(kDeepestPickle) + " others"};
        stack.push_back(item(argument, 0));
        return;
      }
      case Function::same:
        stack.push_back(argument);
        return;
      case Function::drop:
        push(Kind::other);
        return;
      case Function::other:
        // An object of what it is called with.
        if (has_node(argument))
          push_container(Kind::container, {argument});
        else
          push(Kind::other);
        return;
    }
  }

  void push_function(Function f) {
    functions.push_back(f);
    push(Kind::integer, static_cast<int64_t>(functions.size()) - 1);
  }

  void global() {
    const auto module = line(), name = line();
    if (skip_globals > 0) {
      --skip_globals;
      if (skip_globals == 1 && module == "torch" && name == "Tensor") {
        skip_globals = 0;
        return push_function(Function::tensor);
      }
      if (skip_globals == 0) return push(Kind::integer, static_cast<int64_t>(functions.size()) - 1);
    }
    if (module == "torch" && name != "device") {
      const auto value = torch_number(name);
      if (!value) throw Fault{"a pickle in it has an unknown class 'torch." + std::string(name) + "'"};
      return push(Kind::integer, *value);
    }
    if (module == "torch.distributed.rpc") throw Fault{"a pickle in it refers to another process"};
    if (module == "torch._utils" && name == "_rebuild_tensor_v2") return push_function(Function::tensor);
    if (module == "torch._utils" && name == "_rebuild_qtensor") return push_function(Function::quantized);
    if (module == "torch._utils" && name == "_rebuild_parameter") return push_function(Function::parameter);
    if (module == "torch._tensor" && name == "_rebuild_from_type_v2") {
      skip_globals = 2;
      return push_function(Function::from_type);
    }
    if (module == "torch.jit._pickle" && name == "restore_type_tag") return push_function(Function::type_tag);
    if (module == "torch.jit._pickle" && name != "build_tensor_from_id") return push_function(Function::first);
    if (module == "__main__" && name == "IntList") return push_function(Function::same);
    if (module == "collections" && name == "OrderedDict") return push_function(Function::drop);
    push_function(Function::other);
  }

  // One opcode; false after STOP.
  bool step() {
    const auto code = static_cast<unsigned char>(number(1));
    switch (code) {
      case '.':
        return false;
      case 0x80:  // PROTO
        number(1);
        return true;
      case 0x95:  // FRAME
        number(8);
        return true;
      case '(':
        marks.push_back(stack.size());
        return true;
      case ']':
      case '}':
        push_container(Kind::container, {});
        return true;
      case ')':
        push_container(Kind::tuple, {});
        return true;
      case 't':
        push_container(Kind::tuple, pop_to_mark());
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        push_container(Kind::tuple, pop_some(code - 0x84u));
        return true;
      case 'l':
      case 'd': {
        auto items = pop_to_mark();
        if (code == 'd' && items.size() % 2 != 0) inconsistent();
        push_container(Kind::container, std::move(items));
        return true;
      }
      case 'e':
      case 'u':
        put_on_top(pop_to_mark(), code == 'u');
        return true;
      case 'a':
      case 's':
        put_on_top(pop_some(code == 'a' ? 1 : 2), code == 's');
        return true;
      case 'N':
      case 0x88:
      case 0x89:
        push(Kind::other);
        return true;
      case 'J':
        push(Kind::integer, static_cast<int32_t>(number(4)));
        return true;
      case 'K':
        push(Kind::integer, static_cast<int64_t>(number(1)));
        return true;
      case 'M':
        push(Kind::integer, static_cast<int64_t>(number(2)));
        return true;
      case 0x8a:  // the unpickler takes integers of eight bytes alone
        if (number(1) != 8) inconsistent();
        push(Kind::integer, static_cast<int64_t>(number(8)));
        return true;
      case 'G':
        number(8);
        push(Kind::other);
        return true;
      case 'X':
        push_string(number(4));
        return true;
      case 0x8d: {
        const uint64_t size = number(8);
        if (size > pickle.size()) too_short();
        push_string(size);
        return true;
      }
      case 'q':
        put_memo(number(1));
        return true;
      case 'r':
        put_memo(number(4));
        return true;
      case 'h':
        get_memo(number(1));
        return true;
      case 'j':
        get_memo(number(4));
        return true;
      case 'c':
        global();
        return true;
      case 0x81:  // NEWOBJ: the class waits for BUILD
        pop();
        return true;
      case 'R':
      case 'b': {
        const Value argument = pop(), function = pop();
        call(integer(function), argument);
        return true;
      }
      case 'Q':
        storage();
        return true;
      default:
        throw Fault{"a pickle in it has an opcode that PyTorch does not write"};
    }
  }

  // The value that the pickle stands for.
  Value run() {
    if (pickle.size() < 2 || pickle[0] != '\x80') inconsistent();
    if (pickle.size() > UINT32_MAX) throw Fault{"a pickle in it is larger than 4 GiB"};
    while (step()) {
    }
    if (stack.size() != 1) inconsistent();
    return stack.back();
  }

  const std::vector<Value>& items_of(const Value& v) const {
    if (!has_node(v)) inconsistent();
    return nodes[v.at].items;
  }

  // (offset, ((text or lines, file name, first line), begin, end), tag), ...; or these as the third of a tuple whose
  // first is a mark and whose second has the texts that lines and file names are numbers of.
  void check_debug(const Value& root) {
    const auto* records = &tuple(root);
    if (records->empty()) inconsistent();
    const std::vector<Value>* texts = nullptr;
    if (const Value& mark = records->front(); mark.kind == Kind::string && string(mark) == "FORMAT_WITH_STRING_TABLE") {
      texts = &tuple(item(root, 1));
      records = &tuple(item(root, 2));
      for (const Value& t : *texts) string(t);
    }
    std::vector<int64_t> sizes(nodes.size(), -1);  // of a source's text, by its node
    for (const Value& record : *records) {
      integer(item(record, 0));
      const Value& range = item(record, 1);
      const Value& source = item(range, 0);
      if (tuple(range).size() != 3 || tuple(source).size() != 3) inconsistent();
      const int64_t begin = integer(item(range, 1)), end = integer(item(range, 2));
      if (integer(item(source, 2)) < 0) inconsistent();
      int64_t& size = sizes[source.at];
      if (size < 0) {
        size = 0;
        if (texts && !texts->empty()) {
          const auto text = [&](const Value& number) {
            const int64_t i = integer(number);
            if (i < 0 || i >= static_cast<int64_t>(texts->size())) inconsistent();
            return string((*texts)[static_cast<size_t>(i)]);
          };
          // Only what follows the last line's end is empty: PyTorch looks for ends of lines in all else.
          std::optional<std::string_view> before;
          for (const Value& line : items_of(item(source, 0))) {
            const std::string_view one = text(line);
            if (before && (before->empty() || (one.empty() && before->back() != '\n'))) inconsistent();
            size += static_cast<int64_t>(one.size());
            before = one;
          }
          text(item(source, 1));
        } else {
          size = static_cast<int64_t>(string(item(source, 0)).size());
        }
      }
      // PyTorch itself writes (0, 1) for places in no text.
      if (begin < 0 || begin > std::max<int64_t>(size - 1, 0) || begin > end || end > size + (size == 0))
        inconsistent();
    }
  }
};

std::string fault(std::string_view pickle, const StorageBytes& storage_bytes, bool debug) {
  Walker walker(pickle, storage_bytes, debug);
  try {
    const Value root = walker.run();
    if (debug) walker.check_debug(root);
  } catch (const Fault& f) {
    return f.why;
  }
  return "";
}

}  // namespace

std::string pickle_fault(std::string_view pickle, const StorageBytes& storage_bytes) {
  return fault(pickle, storage_bytes, false);
}

std::string debug_fault(std::string_view pickle) { return fault(pickle, {}, true); }

}  // namespace tsmem
