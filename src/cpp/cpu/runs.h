// Runs: up to eight groups that follow each other in a row, the unit in which kernels walk over a tensor.

inline constexpr int kRunGroups = 8;
inline constexpr int kRunElements = kRunGroups * kMaxGroup;

struct Run {
  int64_t row;
  int64_t position; // of the first group's scale, in row-major [rows, groups]
  int64_t col;      // of the first element
  int count;        // groups
  int group_size;
  int last_size; // elements of the last group; that of a row may be short

  int size(int group) const { return group + 1 < count ? group_size : last_size; }
  int blocks(int group) const { return (size(group) + kBlock - 1) / kBlock; }
  int64_t first_block() const { return col / kBlock; }
  // Its first element, in a tensor of this dtype.
  template <DType D>
  char* in(const Dense& x) const {
    return static_cast<char*>(x.data) + (row * x.row_stride + col) * dtype_bytes(D);
  }
};

// Calls f(Run) for the groups [begin, end) of `p`, in order.
template <class Fn>
inline void for_each_run(const Packed& p, int64_t begin, int64_t end, Fn&& f) {
  if (begin >= end) return;
  const int64_t row_groups = num_groups(p.cols, p.group_size);
  Run run = {begin / row_groups, begin, begin % row_groups * p.group_size, 0, p.group_size, 0};
  while (run.position < end) {
    const int64_t in_row = row_groups - run.col / p.group_size, in_range = end - run.position;
    const int64_t left = in_row < in_range ? in_row : in_range;
    run.count = static_cast<int>(left < kRunGroups ? left : kRunGroups);
    const int64_t last = p.cols - run.col - int64_t{run.count - 1} * p.group_size;
    run.last_size = static_cast<int>(last < p.group_size ? last : p.group_size);
    f(static_cast<const Run&>(run));
    run.position += run.count;
    run.col += int64_t{run.count} * p.group_size;
    if (run.col >= p.cols) run.col = 0, ++run.row;
  }
}

// A tensor whose groups fill its rows is one long row to formats without bit planes, which makes for longer runs.
// `x`, if any, is the dense tensor at its side.
inline void join_rows(Packed& p, Dense* x = nullptr) {
  const int bits = kFormats[static_cast<int>(p.format)].bits;
  if (bits != 4 && bits != 8) return;
  if (p.cols == 0 || p.cols % p.group_size != 0 || (x && x->row_stride != p.cols)) return;
  p.cols *= p.rows, p.rows = 1;
  if (x) x->row_stride = p.cols;
}

// --- scales --------------------------------------------------------------------------------------------------

// The stored scale and min of a group; `min` is 0 for formats without one.
template <Format F>
AGOQ_HD GroupScale load_scale(const Packed& p, int64_t position) {
  constexpr int each = FormatTraits<F>::has_min ? 2 : 1;
  if (p.scale_dtype == DType::float32) {
    const float* s = static_cast<const float*>(p.scales) + each * position;
    return {s[0], each == 2 ? s[each - 1] : 0.0f};
  }
  const uint16_t* s = static_cast<const uint16_t*>(p.scales) + each * position;
  return {bfloat_to_float(s[0]), each == 2 ? bfloat_to_float(s[each - 1]) : 0.0f};
}
