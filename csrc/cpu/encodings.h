// How stored numbers are named in templates. Included inside an instruction set's namespace.

struct F32 {
  static constexpr int bytes = 4;
};
struct BF16 {
  static constexpr int bytes = 2;
};
struct F16 {
  static constexpr int bytes = 2;
};
struct E4M3 {
  static constexpr int bytes = 1;
};
struct E5M2 {
  static constexpr int bytes = 1;
};
struct INT8 {
  static constexpr int bytes = 1;
};

static inline int64_t bytes_of(int32_t encoding) {
  return encoding == ATTNPLAT_F32 ? 4 : encoding <= ATTNPLAT_F16 ? 2 : 1;
}
