// The best of a row of scores, by one rule: larger first, then lower; never NaN nor -infinity.

#include "topk.h"

#include <string.h>

#include "attnplat_cpu.h"

namespace attnplat_cpu {
namespace {

// What is never chosen has a key of at most this.
constexpr uint32_t kNever = 0x007fffff;

// Unsigned integers in the order of the numbers; 0 and -0 are one.
inline uint32_t key_of(float x) {
  x += 0.0f;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t negative = uint32_t(int32_t(bits) >> 31);
  uint32_t key = bits ^ (negative | 0x80000000u);
  return key > 0xff800000u ? 0 : key;  // NaN whose sign is not set; others are below already
}

// How many of `count` keys have each value of the eleven bits from `shift` on, among those whose
// higher bits are `prefix`.
void count_digits(const uint32_t *keys, int64_t count, int shift, int64_t *digits) {
  memset(digits, 0, sizeof(int64_t) * 2048);
  for (int64_t n = 0; n < count; n++) digits[keys[n] >> shift & 2047]++;
}

// The digit in which the `wanted`-th largest is; `wanted` becomes its rank among those.
uint32_t find_digit(const int64_t *digits, int64_t *wanted) {
  uint32_t digit = 2047;
  while (digits[digit] < *wanted) *wanted -= digits[digit--];
  return digit;
}

// Keeps those of the keys whose digit is `digit`.
int64_t keep_digit(const uint32_t *from, int64_t count, int shift, uint32_t digit, uint32_t *to) {
  int64_t kept = 0;
  for (int64_t n = 0; n < count; n++) {
    to[kept] = from[n];
    kept += (from[n] >> shift & 2047) == digit;
  }
  return kept;
}

// The `wanted`-th largest key; `wanted` becomes how many equal to it are among the wanted.
uint32_t find_key(const uint32_t *keys, int64_t count, uint32_t *work, int64_t *wanted) {
  int64_t digits[2048];
  uint32_t found = 0;
  // Eleven bits, eleven, and the ten that are left.
  const int shifts[] = {21, 10, 0};
  for (int pass = 0; pass < 3; pass++) {
    int shift = shifts[pass];
    if (pass == 2)
      for (int64_t n = 0; n < count; n++) work[n] &= 1023;
    count_digits(pass == 0 ? keys : work, count, shift, digits);
    uint32_t digit = find_digit(digits, wanted);
    found |= digit << shift;
    if (pass < 2) count = keep_digit(pass == 0 ? keys : work, count, shift, digit, work);
  }
  return found;
}

}  // namespace

void choose_row(const float *scores, int64_t count, int32_t *chosen, int64_t topk,
                uint32_t *scratch) {
  uint32_t *keys = scratch, *work = scratch + count;
  int64_t live = 0;
  for (int64_t n = 0; n < count; n++) {
    keys[n] = key_of(scores[n]);
    live += keys[n] > kNever;
  }
  uint32_t least = kNever + 1;
  int64_t equal = topk;  // how many that are equal to it are taken
  if (live > topk) least = find_key(keys, count, work, &(equal = topk));
  int64_t taken = 0;
  for (int64_t n = 0; n < count && taken < topk; n++) {
    if (keys[n] < least) continue;
    if (keys[n] == least && equal-- <= 0) continue;
    chosen[taken++] = int32_t(n);
  }
  for (; taken < topk; taken++) chosen[taken] = -1;
}

}  // namespace attnplat_cpu
