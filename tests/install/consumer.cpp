// Encodes one row with the installed library and decodes it again; exits 1 when the result is not a 2-bit approximation.
#include <oscar/codec/int2.h>
#include <oscar/version.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  oscar::Int2Config config;
  config.n_head_kv = 2;
  config.head_dim = 64;
  const auto codec = oscar::make_int2_codec(config);

  std::vector<float> row(128), decoded(128);
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = std::sin(static_cast<float>(i) * 0.7F);
  }
  std::vector<std::uint8_t> code(codec->row_bytes());
  oscar::EncodeStats stats;
  codec->encode(row, 7, code, stats);
  codec->decode(code, 7, decoded);

  float worst = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    worst = std::fmax(worst, std::fabs(row[i] - decoded[i]));
  }
  std::printf("oscar %s: %.2f bits per element, largest error %.3f\n", oscar::version(), codec->bits_per_element(),
              static_cast<double>(worst));
  // The step of 4 levels over [-1, 1] is 2/3, so the error is at most half of that; exactly 0 would mean nothing was coded.
  return code.size() == 40 && worst > 0.1F && worst < 0.34F ? 0 : 1;
}
