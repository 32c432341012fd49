// Reads a file of llama_state_seq_save_file() (version 3, one attention cache): what a saved sequence holds, row by row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace oscar::testing {

struct StateFile {
  struct Rows {
    std::uint64_t row_bytes = 0;
    std::vector<std::uint8_t> bytes;  // rows in the order of `positions`
    [[nodiscard]] std::vector<std::uint8_t> row(std::size_t i) const {
      const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(i * row_bytes);
      return {begin, begin + static_cast<std::ptrdiff_t>(row_bytes)};
    }
  };
  std::vector<int> positions;
  std::vector<Rows> k, v;  // per layer

  explicit StateFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<std::uint8_t> data{std::istreambuf_iterator<char>(file), {}};
    std::size_t at = 8;  // magic, version
    const auto read = [&]<class T>(T& value) {
      if (at + sizeof(T) > data.size()) throw std::runtime_error("state file " + path + " is too short");
      std::memcpy(&value, data.data() + at, sizeof(T));
      at += sizeof(T);
    };
    std::uint32_t n_tokens = 0, n_stream = 0;
    read(n_tokens);
    at += std::size_t{4} * n_tokens;
    read(n_stream);
    for (std::uint32_t s = 0; s < n_stream; ++s) {
      std::uint32_t n_cells = 0;
      read(n_cells);
      if (n_cells == 0) continue;
      for (std::uint32_t c = 0; c < n_cells; ++c) {
        std::int32_t position = 0;
        std::uint32_t n_seq = 0;
        read(position);
        read(n_seq);
        at += std::size_t{4} * n_seq;
        positions.push_back(position);
      }
      std::uint32_t transposed = 0, n_layer = 0;
      read(transposed);
      read(n_layer);
      for (std::vector<Rows>* side : {&k, &v}) {
        for (std::uint32_t layer = 0; layer < n_layer; ++layer) {
          std::int32_t type = 0;
          Rows rows;
          read(type);
          read(rows.row_bytes);
          if (at + rows.row_bytes * n_cells > data.size()) throw std::runtime_error("state file " + path + " is too short");
          const auto begin = data.begin() + static_cast<std::ptrdiff_t>(at);
          rows.bytes.assign(begin, begin + static_cast<std::ptrdiff_t>(rows.row_bytes * n_cells));
          at += rows.row_bytes * n_cells;
          side->push_back(std::move(rows));
        }
      }
    }
    if (at != data.size()) throw std::runtime_error("state file " + path + " has trailing bytes");
  }

  // Whether the row of K is a packed code (state_row.h): four NaNs whose low bytes spell OSC2.
  [[nodiscard]] bool packed(std::size_t layer, std::size_t row) const {
    static constexpr std::uint8_t kMagic[8] = {'O', 0x7E, 'S', 0x7E, 'C', 0x7E, '2', 0x7E};
    return std::memcmp(k[layer].bytes.data() + row * k[layer].row_bytes, kMagic, sizeof kMagic) == 0;
  }
};

}  // namespace oscar::testing
