#include "pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <set>
#include <unordered_map>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr std::size_t kMaxObjects = std::size_t{1} << 20;  // bounds memory; a rotation file of 100 layers needs some 5000
constexpr std::size_t kMaxValues = std::size_t{1} << 22;   // the same for the result: the memo can repeat an object at will
constexpr std::size_t kMaxText = std::size_t{1} << 26;     // bytes of all its texts
constexpr int kMaxDepth = 64;

constexpr std::array<std::pair<const char*, const char*>, 10> kStorages = {{{"DoubleStorage", "F64"},
                                                                            {"FloatStorage", "F32"},
                                                                            {"HalfStorage", "F16"},
                                                                            {"BFloat16Storage", "BF16"},
                                                                            {"LongStorage", "I64"},
                                                                            {"IntStorage", "I32"},
                                                                            {"ShortStorage", "I16"},
                                                                            {"CharStorage", "I8"},
                                                                            {"ByteStorage", "U8"},
                                                                            {"BoolStorage", "BOOL"}}};

enum class Op : std::uint8_t {
  mark = '(',
  stop = '.',
  empty_tuple = ')',
  append = 'a',
  appends = 'e',
  bin_float = 'G',
  bin_get = 'h',
  long_bin_get = 'j',
  bin_int = 'J',
  bin_int1 = 'K',
  bin_int2 = 'M',
  none = 'N',
  bin_pers_id = 'Q',
  bin_put = 'q',
  reduce = 'R',
  long_bin_put = 'r',
  set_item = 's',
  set_items = 'u',
  tuple = 't',
  bin_unicode = 'X',
  global = 'c',
  empty_list = ']',
  empty_dict = '}',
  proto = 0x80,
  tuple1 = 0x85,
  tuple2 = 0x86,
  tuple3 = 0x87,
  new_true = 0x88,
  new_false = 0x89,
  long1 = 0x8a,
};

// Opcodes that real files hold and that are refused, by Python's names.
const char* refused_name(std::uint8_t opcode) {
  switch (opcode) {
    case 'b':
      return "BUILD";
    case 'i':
      return "INST";
    case 'o':
      return "OBJ";
    case 'P':
      return "PERSID";
    case 'T':
      return "BINSTRING";
    case 'U':
      return "SHORT_BINSTRING";
    case 'B':
      return "BINBYTES";
    case 'C':
      return "SHORT_BINBYTES";
    case 0x81:
      return "NEWOBJ";
    case 0x82:
      return "EXT1";
    case 0x8b:
      return "LONG4";
    case 0x8c:
      return "SHORT_BINUNICODE";
    case 0x8f:
      return "EMPTY_SET";
    case 0x92:
      return "NEWOBJ_EX";
    case 0x93:
      return "STACK_GLOBAL";
    case 0x94:
      return "MEMOIZE";
    case 0x95:
      return "FRAME";
    default:
      return "unknown";
  }
}

enum class Kind {
  none,
  boolean,
  integer,
  real,
  text,
  list,
  tuple,
  dict,
  ordered_dict_type,
  rebuild_type,
  storage_type,
  storage,
  tensor
};

// One object of the pickle. Objects live in an arena and refer to each other by pointer, so that a malicious cycle is
// harmless; `items` holds a list's or tuple's elements, or a dict's keys and values by turns.
struct Object {
  Kind kind = Kind::none;
  std::int64_t integer = 0;  // also: boolean, storage's numel
  double real = 0;
  std::string text;  // also: dtype of a storage type and a storage
  std::string key;   // of a storage
  std::vector<Object*> items;
  std::shared_ptr<TorchTensor> tensor;
  bool converting = false;                // found again while set: a cycle
  std::shared_ptr<TorchValue> converted;  // objects reached twice stay shared
};

class Machine {
 public:
  Machine(std::span<const std::byte> bytes, const std::string& what, const TorchRebuild& rebuild)
      : bytes_(bytes), what_(what), rebuild_(rebuild) {}

  TorchValue run() {
    if (bytes_.empty()) fail("{} is empty", what_);
    if (std::to_integer<std::uint8_t>(bytes_[0]) != static_cast<std::uint8_t>(Op::proto)) {
      refuse("a pickle of protocol 2 must start with opcode 128 (PROTO)", std::to_integer<std::uint8_t>(bytes_[0]), 0);
    }
    for (;;) {
      start_ = position_;
      opcode_ = number<std::uint8_t>();
      if (static_cast<Op>(opcode_) == Op::stop) break;
      step();
    }
    if (!marks_.empty() || stack_.size() != 1) error("the pickle ends with an unbalanced stack");
    if (position_ != bytes_.size()) error("bytes follow the end of the pickle");
    return convert(*stack_.front(), 0);
  }

 private:
  [[noreturn]] void refuse(const std::string& cause, std::uint8_t opcode, std::size_t offset) const {
    fail("{}: opcode {} (0x{:02x}) at offset {}: {}", what_, opcode, opcode, offset, cause);
  }
  [[noreturn]] void error(const std::string& cause) const { refuse(cause, opcode_, start_); }

  // --- input ---

  std::span<const std::byte> take(std::uint64_t n) {
    if (n > bytes_.size() - position_) {
      if (position_ == start_) fail("{} is truncated at offset {}: it has no STOP opcode", what_, position_);
      error(fmt::format("the pickle is truncated: {} bytes are needed, {} are left", n, bytes_.size() - position_));
    }
    const auto result = bytes_.subspan(position_, static_cast<std::size_t>(n));
    position_ += static_cast<std::size_t>(n);
    return result;
  }

  template <class T>
  T number() {  // little-endian
    std::uint64_t value = 0;
    const auto raw = take(sizeof(T));
    for (std::size_t i = 0; i < sizeof(T); ++i) value |= std::to_integer<std::uint64_t>(raw[i]) << (8 * i);
    return static_cast<T>(value);
  }

  std::string text(std::uint64_t n) {
    const auto raw = take(n);
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }

  std::string line() {
    std::string result;
    for (char c = number<char>(); c != '\n'; c = number<char>()) result += c;
    return result;
  }

  // --- stack ---

  Object& make(Kind kind) {
    if (objects_.size() >= kMaxObjects) error(fmt::format("the pickle holds more than {} objects", kMaxObjects));
    objects_.emplace_back().kind = kind;
    return objects_.back();
  }
  void push(Object& object) { stack_.push_back(&object); }
  void push(Kind kind) { push(make(kind)); }
  void push_integer(std::int64_t value, Kind kind = Kind::integer) {
    Object& object = make(kind);
    object.integer = value;
    push(object);
  }

  [[nodiscard]] std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Object& pop() {
    if (stack_.size() <= floor()) error("the stack is empty");
    Object* top = stack_.back();
    stack_.pop_back();
    return *top;
  }
  Object& top() {
    if (stack_.size() <= floor()) error("the stack is empty");
    return *stack_.back();
  }
  std::vector<Object*> pop_to_mark() {
    if (marks_.empty()) error("there is no MARK on the stack");
    std::vector<Object*> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  void push_tuple(std::size_t n) {
    if (stack_.size() - floor() < n) error("the stack is empty");
    Object& tuple = make(Kind::tuple);
    tuple.items.assign(stack_.end() - static_cast<std::ptrdiff_t>(n), stack_.end());
    stack_.resize(stack_.size() - n);
    push(tuple);
  }
  void extend(Kind kind, const std::vector<Object*>& items) {
    Object& container = top();
    if (container.kind != kind) error(kind == Kind::dict ? "items are set on something that is not a dict" : "not a list");
    if (kind == Kind::dict && items.size() % 2 != 0) error("a key has no value");
    container.items.insert(container.items.end(), items.begin(), items.end());
  }

  void put(std::uint32_t slot) { memo_[slot] = &top(); }
  void get(std::uint32_t slot) {
    const auto found = memo_.find(slot);
    if (found == memo_.end()) error(fmt::format("memo slot {} is not set", slot));
    push(*found->second);
  }

  void step() {
    switch (static_cast<Op>(opcode_)) {
      case Op::proto: {
        const auto protocol = number<std::uint8_t>();
        if (protocol != 2)
          error(fmt::format("pickle protocol {} is not supported, only 2; save with pickle_protocol=2", protocol));
        return;
      }
      case Op::mark:
        marks_.push_back(stack_.size());
        return;
      case Op::none:
        return push(Kind::none);
      case Op::new_true:
        return push_integer(1, Kind::boolean);
      case Op::new_false:
        return push_integer(0, Kind::boolean);
      case Op::bin_int:
        return push_integer(number<std::int32_t>());
      case Op::bin_int1:
        return push_integer(number<std::uint8_t>());
      case Op::bin_int2:
        return push_integer(number<std::uint16_t>());
      case Op::long1:
        return push_integer(long_integer());
      case Op::bin_float: {
        const auto raw = take(8);  // big-endian
        std::uint64_t bits = 0;
        for (const std::byte byte : raw) bits = bits << 8 | std::to_integer<std::uint64_t>(byte);
        Object& object = make(Kind::real);
        object.real = std::bit_cast<double>(bits);
        return push(object);
      }
      case Op::bin_unicode: {
        Object& object = make(Kind::text);
        object.text = text(number<std::uint32_t>());
        return push(object);
      }
      case Op::empty_list:
        return push(Kind::list);
      case Op::empty_dict:
        return push(Kind::dict);
      case Op::empty_tuple:
        return push(Kind::tuple);
      case Op::tuple1:
        return push_tuple(1);
      case Op::tuple2:
        return push_tuple(2);
      case Op::tuple3:
        return push_tuple(3);
      case Op::tuple: {
        Object& tuple = make(Kind::tuple);
        tuple.items = pop_to_mark();
        return push(tuple);
      }
      case Op::append: {
        Object& item = pop();
        return extend(Kind::list, {&item});
      }
      case Op::appends:
        return extend(Kind::list, pop_to_mark());
      case Op::set_item: {
        Object& value = pop();
        Object& key = pop();
        return extend(Kind::dict, {&key, &value});
      }
      case Op::set_items:
        return extend(Kind::dict, pop_to_mark());
      case Op::bin_put:
        return put(number<std::uint8_t>());
      case Op::long_bin_put:
        return put(number<std::uint32_t>());
      case Op::bin_get:
        return get(number<std::uint8_t>());
      case Op::long_bin_get:
        return get(number<std::uint32_t>());
      case Op::global:
        return push_global();
      case Op::bin_pers_id:
        return push_storage();
      case Op::reduce:
        return reduce();
      case Op::stop:
        break;
    }
    error(fmt::format("{} is not a data opcode OSCAR reads; the file may not be a plain torch.save of tensors",
                      refused_name(opcode_)));
  }

  std::int64_t long_integer() {
    const auto raw = take(number<std::uint8_t>());
    if (raw.size() > sizeof(std::int64_t)) error("an integer does not fit in 64 bits");
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < raw.size(); ++i) value |= std::to_integer<std::uint64_t>(raw[i]) << (8 * i);
    const bool negative = !raw.empty() && (std::to_integer<unsigned>(raw.back()) & 0x80U) != 0;
    if (negative && raw.size() < sizeof(value)) value |= ~std::uint64_t{0} << (8 * raw.size());
    return static_cast<std::int64_t>(value);
  }

  // --- the allow-list ---

  void push_global() {
    const std::string module = line();
    const std::string name = line();
    if (module == "collections" && name == "OrderedDict") return push(Kind::ordered_dict_type);
    if (module == "torch._utils" && name == "_rebuild_tensor_v2") return push(Kind::rebuild_type);
    if (module == "torch") {
      for (const auto& [storage, dtype] : kStorages) {
        if (name != storage) continue;
        Object& object = make(Kind::storage_type);
        object.text = dtype;
        return push(object);
      }
    }
    if (module == "torch" && name.ends_with("Storage")) error(fmt::format("dtype not supported: torch.{}", name));
    error(fmt::format("the global '{}.{}' is refused; only plain tensors, dicts, lists and numbers are read", module, name));
  }

  void push_storage() {
    const Object& id = pop();
    const bool sound = id.kind == Kind::tuple && id.items.size() == 5 && id.items[0]->kind == Kind::text &&
                       id.items[0]->text == "storage" && id.items[1]->kind == Kind::storage_type &&
                       id.items[2]->kind == Kind::text && id.items[3]->kind == Kind::text && id.items[4]->kind == Kind::integer;
    if (!sound) error("a persistent id is not a torch storage");
    if (id.items[4]->integer < 0) error("a storage has a negative size");
    Object& storage = make(Kind::storage);
    storage.text = id.items[1]->text;
    storage.key = id.items[2]->text;
    storage.integer = id.items[4]->integer;
    push(storage);
  }

  void reduce() {
    const Object& arguments = pop();
    const Object& callable = pop();
    if (arguments.kind != Kind::tuple) error("the arguments of a call are not a tuple");
    if (callable.kind == Kind::ordered_dict_type) {
      if (!arguments.items.empty()) error("an OrderedDict with initial items is not supported");
      return push(Kind::dict);
    }
    if (callable.kind != Kind::rebuild_type) error("only tensors and OrderedDicts are built, nothing else is called");
    const auto& items = arguments.items;
    const bool sound = items.size() >= 6 && items.size() <= 7 && items[0]->kind == Kind::storage &&
                       items[1]->kind == Kind::integer && items[2]->kind == Kind::tuple && items[3]->kind == Kind::tuple &&
                       items[4]->kind == Kind::boolean && items[5]->kind == Kind::dict && items[5]->items.empty();
    if (!sound) error("a tensor's description is malformed");
    if (items.size() == 7 && !(items[6]->kind == Kind::none || (items[6]->kind == Kind::dict && items[6]->items.empty()))) {
      error("a tensor with extra attributes (conjugate, negative) is not supported");
    }
    TorchView view;
    view.storage = {items[0]->text, items[0]->key, items[0]->integer};
    view.offset = items[1]->integer;
    view.shape = integers(*items[2]);
    view.strides = integers(*items[3]);
    std::shared_ptr<TorchTensor> tensor;
    try {
      tensor = rebuild_(view);
    } catch (const Error& cause) {
      error(cause.what());
    }
    Object& object = make(Kind::tensor);
    object.tensor = std::move(tensor);
    push(object);
  }

  [[nodiscard]] std::vector<std::int64_t> integers(const Object& tuple) const {
    std::vector<std::int64_t> values;
    for (const Object* item : tuple.items) {
      if (item->kind != Kind::integer) error("a tensor's size or stride is not an integer");
      values.push_back(item->integer);
    }
    return values;
  }

  // --- output ---

  TorchValue convert(Object& object, int depth) {
    n_values_ += 1;
    n_text_ += object.text.size();
    if (n_values_ > kMaxValues || n_text_ > kMaxText) fail("{} holds too many values or too much text", what_);
    switch (object.kind) {
      case Kind::none:
        return {};
      case Kind::boolean:
        return {object.integer != 0};
      case Kind::integer:
        return {object.integer};
      case Kind::real:
        return {object.real};
      case Kind::text:
        return {object.text};
      case Kind::tensor:
        return {object.tensor};
      case Kind::list:
      case Kind::tuple:
      case Kind::dict:
        break;
      default:
        fail("{} holds a class or a bare storage where data is expected", what_);
    }
    if (object.converted) return *object.converted;
    if (object.converting) fail("{} holds a container that contains itself", what_);
    if (depth >= kMaxDepth) fail("{} is nested deeper than {} levels", what_, kMaxDepth);
    object.converting = true;
    TorchValue value;
    if (object.kind == Kind::dict) {
      value.data = convert_dict(object, depth);
    } else {
      auto list = std::make_shared<TorchList>();
      for (Object* item : object.items) list->push_back(convert(*item, depth + 1));
      value.data = std::move(list);
    }
    object.converting = false;
    object.converted = std::make_shared<TorchValue>(value);
    return value;
  }

  [[nodiscard]] std::shared_ptr<TorchDict> convert_dict(Object& object, int depth) {
    auto dict = std::make_shared<TorchDict>();
    std::set<std::string> texts;
    std::set<std::int64_t> numbers;
    for (std::size_t i = 0; i < object.items.size(); i += 2) {
      const Object& key = *object.items[i];
      if (key.kind != Kind::text && key.kind != Kind::integer)
        fail("{} holds a dict key that is no text and no integer", what_);
      const bool fresh = key.kind == Kind::text ? texts.insert(key.text).second : numbers.insert(key.integer).second;
      if (!fresh)
        fail("{} holds the dict key '{}' twice", what_, key.kind == Kind::text ? key.text : std::to_string(key.integer));
      dict->emplace_back(convert(*object.items[i], depth + 1), convert(*object.items[i + 1], depth + 1));
    }
    return dict;
  }

  std::span<const std::byte> bytes_;
  const std::string& what_;
  const TorchRebuild& rebuild_;
  std::size_t position_ = 0, start_ = 0;
  std::uint8_t opcode_ = 0;
  std::deque<Object> objects_;  // a deque: pointers stay valid
  std::vector<Object*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint32_t, Object*> memo_;
  std::size_t n_values_ = 0, n_text_ = 0;
};

}  // namespace

TorchValue unpickle(std::span<const std::byte> bytes, const std::string& what, const TorchRebuild& rebuild) {
  return Machine(bytes, what, rebuild).run();
}

std::string torch_storage_name(const std::string& dtype) {
  for (const auto& [storage, name] : kStorages) {
    if (dtype == name) return storage;
  }
  return {};
}

}  // namespace oscar
