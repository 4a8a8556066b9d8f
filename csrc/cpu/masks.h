// The mask algebra on integers: which keys each query token of a task sees.
//
//   allowed(p, j) = j < seq_len  and  j in topk(row)  and
//       ( (causal => j <= p) and window and chunk and tree
//         or p and j in one bidirectional range
//         or (j < prefix_len or j < static_sink_tokens) and (causal => j <= p) )
//
// Included by each instruction set's unit, inside its own namespace.

// Positions as far out as no sequence goes; sums of two stay inside 64 bits.
constexpr int64_t kOpen = int64_t(1) << 40;

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t floor_div(int64_t a, int64_t b) {
  int64_t q = a / b;
  return q * b > a ? q - 1 : q;
}

// What one query token sees: [low, high) and [0, head), and more where `tangled`.
struct Sight {
  int64_t position;
  int64_t low, high, head;
  bool tangled;  // tree or ranges decide, too
};

// A request's own side of the mask.
struct Masks {
  const attnplat_cpu_plan *plan;
  const int32_t *ranges;  // of this request
  int64_t num_ranges;
  int64_t seq_len, query_len, context, first_row;
  bool causal;
  int64_t head;

  Masks(const attnplat_cpu_plan *plan_, int64_t request) : plan(plan_) {
    seq_len = plan->seq_lens[request];
    first_row = plan->query_start[request];
    query_len = plan->query_start[request + 1] - first_row;
    context = seq_len - query_len;
    causal = plan->causal_of ? plan->causal_of[request] != 0 : plan->causal != 0;
    head = plan->static_sink_tokens;
    if (plan->prefix_lens) head = greater(head, plan->prefix_lens[request]);
    ranges = nullptr;
    num_ranges = 0;
    if (plan->ranges) {
      ranges = plan->ranges + 3 * int64_t(plan->range_starts[request]);
      num_ranges = plan->range_starts[request + 1] - plan->range_starts[request];
    }
  }

  bool in_range(int64_t n, int64_t p) const {
    return ranges[3 * n + 1] <= p && p < ranges[3 * n + 2];
  }

  Sight sight(int64_t token) const {
    Sight s;
    int64_t p = s.position = context + token;
    s.low = 0;
    s.high = seq_len;
    if (plan->window_left >= 0) s.low = greater(s.low, p - lesser(plan->window_left, kOpen));
    if (plan->window_right >= 0)
      s.high = lesser(s.high, p + lesser(plan->window_right, kOpen) + 1);
    if (plan->chunk_size > 0) {
      int64_t chunk = floor_div(p, plan->chunk_size) * plan->chunk_size;
      s.low = greater(s.low, chunk);
      s.high = lesser(s.high, chunk + plan->chunk_size);
    }
    if (causal) s.high = lesser(s.high, p + 1);
    s.high = greater(s.high, 0);
    s.low = lesser(s.low, s.high);
    s.head = greater(lesser(lesser(head, seq_len), causal ? p + 1 : seq_len), 0);
    s.tangled = plan->tree_mask != nullptr;
    for (int64_t n = 0; n < num_ranges && !s.tangled; n++) s.tangled = in_range(n, p);
    return s;
  }

  // Bits of [begin, end) among keys first .. first + 64.
  static uint64_t span_bits(int64_t first, int64_t begin, int64_t end) {
    begin = greater(begin - first, 0);
    end = lesser(end - first, 64);
    if (end <= begin) return 0;
    uint64_t below_end = end == 64 ? ~uint64_t(0) : (uint64_t(1) << end) - 1;
    return below_end & ~((uint64_t(1) << begin) - 1);
  }

  // The token's tree bits among keys first .. first + 64; keys before the query part are seen.
  uint64_t tree_bits(int64_t token, int64_t first) const {
    const uint8_t *row = plan->tree_mask + (first_row + token) * plan->tree_stride;
    uint64_t bits = span_bits(first, 0, context);
    int64_t last = lesser(context + 8 * plan->tree_bytes, first + 64);
    for (int64_t j = greater(first, greater(context, 0)); j < last; j++) {
      int64_t at = j - context;
      if (row[at >> 3] >> (at & 7) & 1) bits |= uint64_t(1) << (j - first);
    }
    return bits;
  }

  // Bit n tells whether the token sees key first + n, whatever its topk.
  uint64_t bits(const Sight &s, int64_t token, int64_t first) const {
    uint64_t seen = span_bits(first, s.low, s.high);
    if (!s.tangled) return seen | span_bits(first, 0, s.head);
    if (plan->tree_mask) seen &= tree_bits(token, first);
    seen |= span_bits(first, 0, s.head);
    for (int64_t n = 0; n < num_ranges; n++)
      if (in_range(n, s.position))
        seen |= span_bits(first, ranges[3 * n + 1], lesser(ranges[3 * n + 2], seq_len));
    return seen;
  }
};

// Where the keys lie that some token in [first, last) sees: [low, high) and [0, head).
struct Reach {
  int64_t low, high, head;
  int64_t full_low, full_high;  // keys in between are seen by all; empty where one is tangled

  Reach(const Masks &masks, int64_t first, int64_t last) {
    low = kOpen;
    high = head = full_low = 0;
    full_high = kOpen;
    for (int64_t token = first; token < last; token++) add(masks, masks.sight(token));
    low = greater(low, 0);
    if (high <= low) low = high = 0;
  }

  void add(const Masks &masks, const Sight &s) {
    if (s.high > s.low) {
      low = lesser(low, s.low);
      high = greater(high, s.high);
    }
    head = greater(head, s.head);
    full_low = greater(full_low, s.low);
    full_high = s.tangled ? 0 : lesser(full_high, s.high);
    for (int64_t n = 0; n < masks.num_ranges; n++) {
      if (!masks.in_range(n, s.position)) continue;
      low = lesser(low, masks.ranges[3 * n + 1]);
      high = greater(high, lesser(masks.ranges[3 * n + 2], masks.seq_len));
    }
  }
};
