// emulator/formats.cpp: rounding to bf16 and fp16 (to nearest, ties to even; NaN to 0x7fff, as the cvt instructions do) and back.
#include <bit>
#include <cstdint>

namespace tpk::emulator {

uint16_t to_bf16(float x) noexcept {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

uint16_t to_fp16(float x) noexcept {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= std::bit_cast<uint32_t>(65520.0f)) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < std::bit_cast<uint32_t>(0x1p-14f)) { // a multiple of 2^-24, which is the last place of numbers just above 0.5
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
  }
  return static_cast<uint16_t>(sign | (magnitude + 0xfffu + (magnitude >> 13 & 1) - (112u << 23)) >> 13);
}

float from_fp16(uint16_t half) noexcept {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
  if (magnitude >= 0x7c00u << 13) return std::bit_cast<float>(sign | 0x7f800000u | magnitude);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

} // namespace tpk::emulator
