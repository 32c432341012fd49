// `torch.save` zip files (.pt), read and written without torch and without executing anything: the pickle is interpreted by a
// small machine that knows only data opcodes and an allow-list of globals (torch._utils._rebuild_tensor_v2, torch.*Storage,
// collections.OrderedDict); anything else is an Error naming opcode and offset.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace oscar {

struct TorchTensor {  // gathered to contiguous row-major, byte order of this machine
  std::string dtype;  // "F32", "F64", "F16", "BF16", "I32", "I64", ...: safetensors' names
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

struct TorchValue;
using TorchDict = std::vector<std::pair<TorchValue, TorchValue>>;  // insertion order
using TorchList = std::vector<TorchValue>;                         // list or tuple

struct TorchValue {
  std::variant<std::monostate, bool, std::int64_t, double, std::string, std::shared_ptr<TorchTensor>,
               std::shared_ptr<TorchList>, std::shared_ptr<TorchDict>>
      data;
};

TorchValue read_torch(const std::filesystem::path& path);
void write_torch(const TorchValue& value, const std::filesystem::path& path);

}  // namespace oscar
