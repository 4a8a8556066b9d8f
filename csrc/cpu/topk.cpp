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

constexpr int kDigits = 2048;  // values of eleven bits
constexpr int kTop = 21;       // where a key's first eleven bits begin
constexpr uint32_t kLeastLive = (kNever >> kTop) + 1;

// Writes the keys, and how many have each value of their first eleven bits. Neighbours are counted
// apart, since scores that are alike would wait for each other's count.
void read_keys(const float *scores, int64_t count, uint32_t *keys, int64_t *digits) {
  int32_t apart[4][kDigits];
  memset(apart, 0, sizeof(apart));
  int64_t n = 0;
  for (; n + 4 <= count; n += 4)
    for (int i = 0; i < 4; i++) {
      keys[n + i] = key_of(scores[n + i]);
      apart[i][keys[n + i] >> kTop]++;
    }
  for (; n < count; n++) {
    keys[n] = key_of(scores[n]);
    apart[0][keys[n] >> kTop]++;
  }
  for (int digit = 0; digit < kDigits; digit++)
    digits[digit] = int64_t(apart[0][digit]) + apart[1][digit] + apart[2][digit] + apart[3][digit];
}

// The digit in which the `wanted`-th largest is; `wanted` becomes its rank among those.
uint32_t find_digit(const int64_t *digits, int64_t *wanted) {
  uint32_t digit = kDigits - 1;
  while (digits[digit] < *wanted) *wanted -= digits[digit--];
  return digit;
}

// Of keys, the `wanted`-th largest by their eleven bits from `shift` on: those bits, and the keys
// that have them, in place.
uint32_t keep_digit(uint32_t *keys, int64_t *count, int shift, int64_t *wanted) {
  int64_t digits[kDigits] = {0};
  for (int64_t n = 0; n < *count; n++) digits[keys[n] >> shift & (kDigits - 1)]++;
  uint32_t digit = find_digit(digits, wanted);
  int64_t kept = 0;
  for (int64_t n = 0; n < *count; n++) {
    uint32_t key = keys[n];
    keys[kept] = key;
    kept += (key >> shift & (kDigits - 1)) == digit;
  }
  *count = kept;
  return digit << shift;
}

// Where the keys whose first eleven bits are at least `digit` are.
int64_t find_candidates(const uint32_t *keys, int64_t count, uint32_t digit, uint32_t *places) {
  int64_t found = 0;
  for (int64_t n = 0; n < count; n++) {
    places[found] = uint32_t(n);
    found += keys[n] >> kTop >= digit;
  }
  return found;
}

}  // namespace

void choose_row(const float *scores, int64_t count, int32_t *chosen, int64_t topk,
                uint32_t *scratch) {
  uint32_t *keys = scratch, *places = scratch + count, *same = scratch + 2 * count;
  int64_t digits[kDigits], live = 0;
  read_keys(scores, count, keys, digits);
  for (int digit = kLeastLive; digit < kDigits; digit++) live += digits[digit];
  uint32_t digit = kLeastLive, least = kNever + 1;
  int64_t equal = topk;  // how many that are equal to the least are taken
  if (live > topk && topk > 0) digit = find_digit(digits, &equal);
  int64_t found = find_candidates(keys, count, digit, places);
  if (live > topk && topk > 0) {
    int64_t left = 0;
    for (int64_t n = 0; n < found; n++)
      if (keys[places[n]] >> kTop == digit) same[left++] = keys[places[n]];
    least = digit << kTop;
    least |= keep_digit(same, &left, 10, &equal);
    for (int64_t n = 0; n < left; n++) same[n] &= 1023;
    least |= keep_digit(same, &left, 0, &equal);
  }
  int64_t taken = 0;
  for (int64_t n = 0; n < found && taken < topk; n++) {
    uint32_t key = keys[places[n]];
    if (key < least) continue;
    if (key == least && equal-- <= 0) continue;
    chosen[taken++] = int32_t(places[n]);
  }
  for (; taken < topk; taken++) chosen[taken] = -1;
}

}  // namespace attnplat_cpu
