// Operations for which torch has no fast kernel on the CPU. In this order: registers, small products, attention of whole sequences
// and back, the cache and attention of new tokens, elementwise parts of a decoder (one pass over memory each, and back), whole
// steps of decoding, and the names by which library.py finds them all.
//
// Numbers are float32 or bfloat16 in memory and float32 in registers. Nothing here depends on the number of threads or on
// what lies beside a row: every sum has one order, which goes by the row alone, and keys that a query does not see add
// exact zeros (as long as values are finite: where one is not, the queries computed together with its own are not either).
// Tensors' last dimension is contiguous; strides count numbers, not bytes. Matrices are row by row.
// What a kernel is given was checked (calls.py). It returns whether there was memory for it: threads ask for none themselves.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include <omp.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Whether there are matrix registers: eight of 16 rows of 64 bytes, whose products of bfloat16 are summed in float32 (AMX, on
// processors that have products of pairs as well). PLAUDIT_MATRICES plays such a processor.
#if defined(PLAUDIT_MATRICES)
#define MATRICES 1
#define PLAUDIT_PAIRS
#elif defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define MATRICES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define MATRICES 0
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;   // float32 numbers in a register
constexpr int TALL = 12;  // rows of a tile of a product, of two registers each
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr int TALL = 12;
#else
constexpr int W = 8;
constexpr int TALL = 6;
#endif
constexpr int WIDE = 2 * W;  // columns of a tile, and positions of a page of keys
constexpr int QUERIES = 24;  // computed together
constexpr int64_t BLOCK = 8192;  // entries that a thread works on at once
constexpr int64_t PARTS = 64;    // runs of rows of a sum over rows
constexpr int AHEAD = 12;    // rows that are fetched before they are read

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef uint32_t words __attribute__((vector_size(4 * W)));
typedef uint16_t halves __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};

// Whether sums of products of bfloat16 take two entries at once (AVX512_BF16). PLAUDIT_PAIRS plays such a processor.
#if defined(__AVX512BF16__) || defined(PLAUDIT_PAIRS)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// What the left side of a product with weights of T is kept as.
template <class T>
using Left = std::conditional_t<PAIRS && std::is_same_v<T, bf16>, bf16, float>;

// x y + z, rounded once. Nothing else is contracted (see the compiler's flags): a compiler chooses differently from place
// to place, and sums would differ by where they are computed.
inline vec fma(vec x, vec y, vec z) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
  for (int i = 0; i < W; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
#endif
}

inline vec splat(float x) { return x - vec{}; }

// z and the products of both bfloat16 in each entry of x and y, the odd one first.
inline vec fma_pairs(ints x, ints y, vec z) {
#if defined(__AVX512BF16__)
  return (vec)_mm512_dpbf16_ps((__m512)z, (__m512bh)(__m512i)x, (__m512bh)(__m512i)y);
#else
  words a = (words)x, b = (words)y;
  return fma((vec)(a << 16), (vec)(b << 16), fma((vec)(a & 0xffff0000u), (vec)(b & 0xffff0000u), z));
#endif
}

inline vec load(const float* from) {
  vec x;
  memcpy(&x, from, sizeof x);
  return x;
}

inline vec load(const bf16* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#else
  halves half;
  memcpy(&half, from, sizeof half);
  words wide = __builtin_convertvector(half, words) << 16;
  vec x;
  memcpy(&x, &wide, sizeof x);
  return x;
#endif
}

inline void store(float* to, vec x) { memcpy(to, &x, sizeof x); }

// To even. Numbers too small for a normal one become 0 where the processor rounds.
inline halves rounded(vec x) {
#if defined(__AVX512BF16__)
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
  words bits;
  memcpy(&bits, &x, sizeof bits);
  words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  words quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector(x == x ? nearest : quiet, halves);
#endif
}

inline void store(bf16* to, vec x) {
  halves half = rounded(x);
  memcpy(to, &half, sizeof half);
}

inline float number(float x) { return x; }

inline float number(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) { to.bits = rounded(splat(x))[0]; }

// The first `count` of W numbers; the others are 0, or left as they were.
template <class T>
inline vec load_some(const T* from, int64_t count) {
  if (count >= W) return load(from);
  T part[W] = {};
  memcpy(part, from, count * sizeof(T));
  return load(part);
}

template <class T>
inline void store_some(T* to, vec x, int64_t count) {
  if (count >= W) return store(to, x);
  T part[W];
  store(part, x);
  memcpy(to, part, count * sizeof(T));
}

inline ints lanes() {
  ints found;
  for (int i = 0; i < W; i++) found[i] = i;
  return found;
}

inline vec smaller(vec a, vec b) { return a < b ? a : b; }
inline vec larger(vec a, vec b) { return a > b ? a : b; }

// Entry i of the result is entry from[i] of a and b, one behind the other.
inline vec shuffled(vec a, vec b, ints from) {
#if defined(__clang__)
  vec result;
  for (int i = 0; i < W; i++) result[i] = from[i] < W ? a[from[i]] : b[from[i] - W];
  return result;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

// Entry i of the result is entry i + `by` of x, round and round.
template <int by>
inline vec turned(vec x) {
  ints from;
  for (int i = 0; i < W; i++) from[i] = (i + by) % W;
  return shuffled(x, x, from);
}

inline float sum(vec x) {
  if constexpr (W == 16) x += turned<8>(x);
  if constexpr (W >= 8) x += turned<4>(x);
  x += turned<2>(x);
  return x[0] + x[1];
}

inline float largest(vec x) {
  if constexpr (W == 16) x = larger(x, turned<8>(x));
  if constexpr (W >= 8) x = larger(x, turned<4>(x));
  x = larger(x, turned<2>(x));
  return x[0] > x[1] ? x[0] : x[1];
}

// e^x to 1e-7 of it (Cephes' polynomial). NaN stays NaN.
inline vec exponential(vec x) {
  vec y = larger(smaller(x, splat(88.37f)), splat(-87.33f));
  vec n = fma(y, splat(1.44269504088896341f), splat(12582912.f)) - 12582912.f;  // nearest whole number
  vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), y));
  vec p = splat(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, splat(term));
  p = fma(p, r * r, r) + 1.f;
  ints power = (__builtin_convertvector(n, ints) + 127) << 23;
  vec scale;
  memcpy(&scale, &power, sizeof scale);
  vec result = p * scale;
  return x == x ? result : x;
}

inline vec sigmoid(vec x) { return 1.f / (1.f + exponential(-x)); }

inline int64_t up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// What the threads of a call work in: `together` numbers for all, and `each` for every thread. Up to KEPT bytes a thread are
// kept for the caller's next call, and more is given back.
struct Memory {
  char* data = nullptr;
  size_t size = 0;
  ~Memory() { free(data); }
};
thread_local Memory memory;
constexpr size_t KEPT = 4 << 20;

class Room {
 public:
  Room(int64_t together, int64_t each, int64_t threads)
      : common(up(together, 16)), own(up(each, 16)), most(KEPT * size_t(threads)) {
    size_t bytes = size_t(common + own * threads) * sizeof(float);
    if (bytes > memory.size) {
      free(memory.data);
      memory.data = static_cast<char*>(aligned_alloc(64, up(bytes, 64)));
      memory.size = memory.data ? bytes : 0;
    }
    data = reinterpret_cast<float*>(memory.data);
  }
  Room(const Room&) = delete;
  ~Room() {
    if (memory.size <= most) return;
    free(memory.data);
    memory.data = nullptr;
    memory.size = 0;
  }
  explicit operator bool() const { return data || common + own == 0; }
  float* shared() const { return data; }
  float* of(int64_t thread) const { return data + common + own * thread; }
  float* mine() const { return of(omp_get_thread_num()); }

 private:
  int64_t common, own;
  size_t most;
  float* data;
};

// Parts of such memory, one after another.
struct Parts {
  float* data;
  float* take(int64_t floats) {
    float* part = data;
    data += up(floats, 16);
    return part;
  }
};

constexpr int64_t LINE = 64;  // bytes that come into a cache together

// Of so many registers with numbers of T.
template <class T>
constexpr int lines(int registers) {
  return registers * W * int(sizeof(T)) / int(LINE);
}

template <int FETCH>
inline void fetch_lines(const char* from, int64_t time) {
  for (int i = 0; i < FETCH; i++) __builtin_prefetch(from + (time * FETCH + i) * LINE, 0, 2);
}

// A (m, k) times B (k, n), n a multiple of W. Entry (i, j) of A is at a[i * a_row + j * a_column]. B lies in panels of WIDE
// columns, `b_panel` apart, whose rows are `b_row` apart. `end(row, column, sums, registers)` gets each row's sums from a
// column on. A sum goes through k in order. Where A is bfloat16, k is even, A's columns lie side by side, and so do the two
// entries of a column in rows 2j and 2j + 1 of B.
// Meanwhile what lies from `later` on is fetched, FETCH lines for each row (or two) of B.
template <int FETCH, int M, int V, class A, class T, class End>
inline __attribute__((always_inline)) void tile(int64_t k, const A* a, int64_t a_row, int64_t a_column, const T* b,
                                                int64_t b_row, const char* later, int64_t row, int64_t column,
                                                const End& end) {
  vec sums[M][V] = {};
  if constexpr (std::is_same_v<A, bf16>) {
    for (int64_t j = 0; j < k; j += 2) {
      fetch_lines<FETCH>(later, j / 2);
      ints entries[V];
      for (int v = 0; v < V; v++) memcpy(&entries[v], b + j * b_row + v * 2 * W, sizeof(ints));
      for (int i = 0; i < M; i++) {
        int32_t pair;
        memcpy(&pair, a + i * a_row + j, sizeof pair);
        for (int v = 0; v < V; v++) sums[i][v] = fma_pairs(pair - ints{}, entries[v], sums[i][v]);
      }
    }
  } else {
    for (int64_t j = 0; j < k; j++) {
      fetch_lines<FETCH>(later, j);
      vec entries[V];
      for (int v = 0; v < V; v++) entries[v] = load(b + j * b_row + v * W);
      for (int i = 0; i < M; i++) {
        vec factor = splat(a[i * a_row + j * a_column]);
        for (int v = 0; v < V; v++) sums[i][v] = fma(factor, entries[v], sums[i][v]);
      }
    }
  }
  for (int i = 0; i < M; i++) end(row + i, column, sums[i], V);
}

template <int FETCH, int M, int V, class A, class T, class End>
inline void band(int64_t m, int64_t k, const A* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_row,
                 const char* later, int64_t row, int64_t column, const End& end) {
  if (m == M)
    tile<FETCH, M, V>(k, a, a_row, a_column, b, b_row, later, row, column, end);
  else if constexpr (M > 1)
    band<FETCH, M - 1, V>(m, k, a, a_row, a_column, b, b_row, later, row, column, end);
}

template <class A, class T, class End>
inline void panel(int64_t m, int64_t k, const A* a, int64_t a_row, const T* b, int64_t first, int64_t column,
                  const End& end) {
  const char* later = reinterpret_cast<const char*>(b + k * WIDE);  // the next panel, as long as this one
  int64_t bytes = k * WIDE * int64_t(sizeof(T)), along = k / (std::is_same_v<A, bf16> ? 2 : 1) * LINE;
  for (int64_t row = 0, fetched = 0; row < m; row += TALL, fetched += along) {
    int64_t rows = m - row < TALL ? m - row : TALL;
    const A* left = a + row * a_row;
    if (m <= TALL)
      band<2, TALL, 2>(rows, k, left, a_row, 1, b, WIDE, later, first, column, end);
    else if (fetched < bytes)
      band<1, TALL, 2>(rows, k, left, a_row, 1, b, WIDE, later + fetched, first + row, column, end);
    else
      band<0, TALL, 2>(rows, k, left, a_row, 1, b, WIDE, later, first + row, column, end);
  }
}

#if MATRICES
// How many rows of how many bytes each matrix register has: palette 1 of the processor's manual.
struct Forms {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

#if !defined(PLAUDIT_MATRICES)
#define matrices_left _tile_release
#define matrix_zero _tile_zero
#define matrix_load _tile_loadd
#define matrix_store _tile_stored
#define matrix_add_product _tile_dpbf16ps
// Linux gives them to a process that asks (ARCH_REQ_XCOMP_PERM, XTILEDATA).
inline bool matrices_lent() {
  static const bool lent = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return lent;
}
// Not _tile_loadconfig, which tells some compilers that it reads 8 bytes (GCC's bug 114098). What was written before is in
// memory for the loads that follow, which tell nothing.
inline void matrices_formed(const Forms* from) { asm volatile("ldtilecfg %0" : : "m"(*from) : "memory"); }
#else
thread_local Forms forms;
thread_local char matrices[8][16][64];
inline bool matrices_lent() { return true; }
inline void matrices_left() {}
inline void matrices_formed(const Forms* from) {
  forms = *from;
  memset(matrices, 0, sizeof matrices);
}
inline void matrix_zero(int to) { memset(matrices[to], 0, sizeof matrices[to]); }
inline void matrix_load(int to, const void* from, int64_t stride) {
  for (int i = 0; i < forms.rows[to]; i++)
    memcpy(matrices[to][i], static_cast<const char*>(from) + i * stride, forms.bytes[to]);
}
inline void matrix_store(int from, void* to, int64_t stride) {
  for (int i = 0; i < forms.rows[from]; i++)
    memcpy(static_cast<char*>(to) + i * stride, matrices[from][i], forms.bytes[from]);
}
inline void matrix_add_product(int to, int a, int b) {
  bool fits = forms.rows[a] == forms.rows[to] && forms.bytes[a] == 4 * forms.rows[b] && forms.bytes[b] == forms.bytes[to];
  if (!fits) abort();  // as the processor would
  for (int i = 0; i < forms.rows[to]; i++)
    for (int64_t part = 0; part < 64; part += sizeof(vec)) {
      vec sums;
      memcpy(&sums, matrices[to][i] + part, sizeof sums);
      for (int j = 0; j < forms.rows[b]; j++) {
        int32_t pair;
        ints entries;
        memcpy(&pair, matrices[a][i] + 4 * j, sizeof pair);
        memcpy(&entries, matrices[b][j] + part, sizeof entries);
        sums = fma_pairs(pair - ints{}, entries, sums);
      }
      memcpy(matrices[to][i] + part, &sums, sizeof sums);
    }
}
#endif

constexpr int64_t SIDE = 16;        // rows of a matrix register, and columns of one with sums
constexpr int64_t DEEP = 2 * SIDE;  // columns of one with bfloat16

// As `panel` of WIDE columns, by matrix registers: sums in 0 to 3 (two rows of two), A in 4 and 5, B in 6 and 7. It goes
// through k by parts that stay in the cache, between which `kept` (m, WIDE) has the sums. What is left of k is added by pairs.
template <class End>
inline void matrix_panel(int64_t m, int64_t k, const bf16* a, int64_t a_row, const bf16* b, float* kept, int64_t first,
                         int64_t column, const End& end) {
  constexpr bool BESIDE = WIDE > SIDE;
  constexpr int64_t ACROSS = WIDE * sizeof(float), PART = 8 * DEEP;
  int64_t whole = k / DEEP * DEEP, along = a_row * int64_t(sizeof(bf16)), before = 0;
  for (int64_t part = 0; part == 0 || part < whole; part += PART)
    for (int64_t row = 0; row < m; row += 2 * SIDE) {
      int64_t rows = m - row < 2 * SIDE ? m - row : 2 * SIDE, above = rows < SIDE ? rows : SIDE, below = rows - above;
      int64_t until = part + PART < whole ? part + PART : whole;
      if (rows != before) {
        Forms form;
        for (int r = 0; r < 8; r++) {
          form.bytes[r] = 64;
          form.rows[r] = uint8_t(r >= 6 ? SIDE : r < 2 || r == 4 || !below ? above : below);
        }
        matrices_formed(&form);
        before = rows;
      }
      const bf16* left = a + row * a_row;
      float *upper = kept + row * WIDE, *lower = upper + SIDE * WIDE;
      if (part == 0) {
        matrix_zero(0);
        matrix_zero(1);
        matrix_zero(2);
        matrix_zero(3);
      } else {
        matrix_load(0, upper, ACROSS);
        if (BESIDE) matrix_load(1, upper + SIDE, ACROSS);
        if (below) {
          matrix_load(2, lower, ACROSS);
          if (BESIDE) matrix_load(3, lower + SIDE, ACROSS);
        }
      }
      for (int64_t j = part; j < until; j += DEEP) {
        const bf16* right = b + j * WIDE;
        matrix_load(6, right, ACROSS);
        matrix_load(4, left + j, along);
        matrix_add_product(0, 4, 6);
        if (BESIDE) {
          matrix_load(7, right + DEEP, ACROSS);
          matrix_add_product(1, 4, 7);
        }
        if (below) {
          matrix_load(5, left + SIDE * a_row + j, along);
          matrix_add_product(2, 5, 6);
          if (BESIDE) matrix_add_product(3, 5, 7);
        }
      }
      matrix_store(0, upper, ACROSS);
      if (BESIDE) matrix_store(1, upper + SIDE, ACROSS);
      if (below) {
        matrix_store(2, lower, ACROSS);
        if (BESIDE) matrix_store(3, lower + SIDE, ACROSS);
      }
      if (until < whole) continue;
      for (int64_t i = 0; i < rows; i++) {
        vec found[2] = {load(upper + i * WIDE), load(upper + i * WIDE + W)};
        for (int64_t j = whole; j < k; j += 2) {
          int32_t pair;
          memcpy(&pair, left + i * a_row + j, sizeof pair);
          for (int v = 0; v < 2; v++) {
            ints entries;
            memcpy(&entries, b + j * WIDE + v * 2 * W, sizeof entries);
            found[v] = fma_pairs(pair - ints{}, entries, found[v]);
          }
        }
        end(first + row + i, column, found, 2);
      }
    }
}
#else
inline bool matrices_lent() { return false; }
inline void matrices_left() {}
#endif

// As `panel` of WIDE columns, by what multiplies T fastest, with room for (m, WIDE) sums. A thread that is done says so by
// `matrices_left`.
template <class T, class End>
inline void whole_panel(int64_t m, int64_t k, const Left<T>* a, int64_t a_row, const T* b, float* kept, int64_t first,
                        int64_t column, const End& end) {
#if MATRICES
  if constexpr (std::is_same_v<T, bf16>)
    if (matrices_lent()) return matrix_panel(m, k, a, a_row, b, kept, first, column, end);
#endif
  panel(m, k, a, a_row, b, first, column, end);
}

// C (m, n) = A B, or added to C.
template <int FETCH = 0, class T>
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column, const T* b,
              int64_t b_panel, int64_t b_row, float* c, int64_t c_row, bool add = false, const T* later = nullptr) {
  auto end = [=](int64_t row, int64_t column, const vec* sums, int registers) {
    for (int v = 0; v < registers; v++) {
      float* to = c + row * c_row + column + v * W;
      store(to, add ? load(to) + sums[v] : sums[v]);
    }
  };
  const char* fetched = reinterpret_cast<const char*>(later);
  for (int64_t column = 0; column < n; column += WIDE, fetched += FETCH * k * LINE)
    for (int64_t row = 0; row < m; row += TALL) {
      const T* right = b + column / WIDE * b_panel;
      const float* left = a + row * a_row;
      int64_t rows = m - row < TALL ? m - row : TALL;
      if (n - column >= WIDE)
        band<FETCH, TALL, 2>(rows, k, left, a_row, a_column, right, b_row, fetched, row, column, end);
      else
        band<FETCH, TALL, 1>(rows, k, left, a_row, a_column, right, b_row, fetched, row, column, end);
    }
}

// Attention of whole sequences. Sequence s is the tokens index[starts[s]..starts[s + 1]), of which the first
// begins[s + 1] - begins[s] are an earlier sequence's too: its queries, and it gets what this one's queries make of them.
struct Rows {
  const int64_t *index, *starts, *begins;
  int64_t count;  // sequences
  int64_t length(int64_t s) const { return starts[s + 1] - starts[s]; }
  int64_t shared(int64_t s) const { return begins[s + 1] - begins[s]; }
};

struct Shape {
  int64_t heads, kv_heads, dim, window, threads;  // window: keys that a query sees, itself among them
  int64_t share() const { return heads / kv_heads; }
};

// Threads that compute a key head of a sequence together: all of them, or one by itself.
struct Team {
  int64_t rank, size;
  void meet() const {
    if (size == 1) return;
#pragma omp barrier
  }
};

// Which numbers of 0..count a thread of a team has: whole pages.
struct Range {
  int64_t from, to;
  Range(int64_t count, const Team& team) {
    int64_t each = up((count + team.size - 1) / team.size, WIDE);
    from = team.rank * each < count ? team.rank * each : count;
    to = from + each < count ? from + each : count;
  }
  int64_t size() const { return to - from; }
};

// How the key heads of sequences are shared out. A thread has one by itself, but for those so long that other threads would
// wait for it: all compute these together, one after another, in runs of QUERIES queries of a head. That may be `more` fifths
// of the work more.
class Work {
 public:
  Work(const Rows& rows, const Shape& shape, int64_t more) : rows(rows), shape(shape), more(more) {
    for (int64_t s = 0; s < rows.count; s++) total += of(s) * shape.kv_heads;
    for (int64_t s = 0; s < rows.count; s++) {
      int64_t& longest = together(s) ? longest_together : longest_alone;
      if (rows.length(s) > longest) longest = rows.length(s);
    }
  }
  bool together(int64_t s) const {
    int64_t all = rows.count * shape.kv_heads, threads = shape.threads;
    if (threads == 1 || runs(s) * shape.share() < 4 * threads) return false;
    return of(s) * (5 * threads - more) > 5 * total || (!more && 2 * of(s) * threads > total && all % threads);
  }
  int64_t runs(int64_t s) const { return (rows.length(s) - rows.shared(s) + QUERIES - 1) / QUERIES; }
  int64_t longest() const { return longest_together > longest_alone ? longest_together : longest_alone; }
  int64_t longest_together = 0, longest_alone = 0;

 private:
  int64_t of(int64_t s) const {
    int64_t length = rows.length(s), shared = rows.shared(s), keys = length + shared;
    return (length - shared) * (keys < 2 * shape.window ? keys : 2 * shape.window);
  }
  const Rows& rows;
  const Shape& shape;
  int64_t more, total = 0;
};

// A run of queries of one head of a sequence.
struct Run {
  int64_t head, first, count;
  Run(int64_t number, int64_t runs, int64_t kv, int64_t share, int64_t shared, int64_t length)
      : head(kv * share + number / runs), first(shared + number % runs * QUERIES) {
    count = length - first < QUERIES ? length - first : QUERIES;
  }
};

template <class T>
void gather(const T* from, int64_t stride, const int64_t* index, int64_t rows, int64_t dim, float* to, int64_t width,
            float scale) {
  for (int64_t i = 0; i < rows; i++) {
    const T* row = from + index[i] * stride;
    const T* later = from + index[i + AHEAD < rows ? i + AHEAD : i] * stride;
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(later + d);
    for (int64_t d = 0; d < width; d += W)
      store(to + i * width + d, d < dim ? load_some(row + d, dim - d) * scale : vec{});
  }
}

// Rows that are read or written later are fetched now.
template <class T>
inline void fetch(const T* to, int64_t stride, const int64_t* index, int64_t rows, int64_t dim) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(to + index[i] * stride + d, 1);
}

// Rows become columns. In each of the rounds, squares of `side` beside the diagonal change places.
template <int side>
inline void transpose(vec* rows) {
  ints upper, lower;
  for (int i = 0; i < W; i++) {
    upper[i] = i & side ? W + i - side : i;
    lower[i] = i & side ? W + i : i + side;
  }
  for (int i = 0; i < W; i++)
    if (!(i & side)) {
      vec a = rows[i], b = rows[i + side];
      rows[i] = shuffled(a, b, upper);
      rows[i + side] = shuffled(a, b, lower);
    }
  if constexpr (side > 1) transpose<side / 2>(rows);
}

// (rows, width) into pages (dim, WIDE), the last one filled up with zeros.
void paged(const float* from, int64_t rows, int64_t dim, int64_t width, float* to) {
  for (int64_t i = 0; i < up(rows, WIDE); i += W)
    for (int64_t d = 0; d < dim; d += W) {
      vec square[W];
      for (int64_t j = 0; j < W; j++) square[j] = i + j < rows ? load(from + (i + j) * width + d) : vec{};
      transpose<W / 2>(square);
      float* block = to + (i / WIDE * dim + d) * WIDE + i % WIDE;
      for (int64_t j = 0; j < W && d + j < dim; j++) store(block + j * WIDE, square[j]);
    }
}

// The keys low..high that queries first..first + count see; low is a page's first.
struct Seen {
  int64_t low, high;
  Seen(int64_t first, int64_t count, int64_t window) {
    int64_t oldest = first - window + 1;
    low = oldest > 0 ? oldest / WIDE * WIDE : 0;
    high = first + count;
  }
};

// x of the keys from `key` on, with another number where the query does not see them.
inline vec hide(vec x, int64_t key, int64_t query, int64_t window, float with) {
  if (key + W - 1 <= query && key > query - window) return x;
  ints age = int32_t(query - key) - lanes();
  return (age >= 0) & (age < int32_t(window)) ? x : splat(with);
}

// A query's scores of keys low..high become weights e^(score - largest), 0 where a key is not seen. Returns the largest
// score, and the weights' sum in `total`.
inline float weigh(float* scores, int64_t low, int64_t high, int64_t query, int64_t window, float* total) {
  vec most = splat(-INFINITY);
  for (int64_t j = low; j < high; j += W) {
    vec x = hide(load(scores + j - low), j, query, window, -INFINITY);
    store(scores + j - low, x);
    most = larger(most, x);
  }
  float top = largest(most);
  vec sums = {};
  for (int64_t j = low; j < high; j += W) {
    vec p = hide(exponential(load(scores + j - low) - top), j, query, window, 0);
    store(scores + j - low, p);
    sums += p;
  }
  *total = sum(sums);
  return top;
}

// `one(s, kv, team, tables, own)` for each key head of each sequence: `tables` are the team's, `own` a thread's.
template <class One>
void share_out(const Rows& rows, const Shape& shape, const Work& work, const Room& room, int64_t table, const One& one) {
#pragma omp parallel num_threads(shape.threads)
  {
    if (work.longest_together) {
      Team all{omp_get_thread_num(), omp_get_num_threads()};
      for (int64_t s = 0; s < rows.count; s++)
        for (int64_t kv = 0; kv < shape.kv_heads && work.together(s); kv++) one(s, kv, all, room.shared());
    }
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t s = 0; s < rows.count; s++)
      for (int64_t kv = 0; kv < shape.kv_heads; kv++)
        if (!work.together(s)) one(s, kv, Team{0, 1}, room.mine() + table);
  }
}

template <class T>
bool attend(const Rows& rows, const Shape& shape, const T* query, int64_t query_stride, const T* key, int64_t key_stride,
            const T* value, int64_t value_stride, T* out, float* logs) {
  Work work(rows, shape, 0);
  int64_t dim = shape.dim, width = up(dim, W), keys = up(work.longest(), WIDE), share = shape.share();
  int64_t desk = QUERIES * (2 * width + keys) + 64, row = 2 * width + dim;
  Room room(up(work.longest_together, WIDE) * row + 64, desk + up(work.longest_alone, WIDE) * row + 64, shape.threads);
  if (!room) return false;
  float scale = 1.f / sqrtf(float(dim));
  share_out(rows, shape, work, room, desk, [&](int64_t s, int64_t kv, Team team, float* tables) {
    const int64_t* index = rows.index + rows.starts[s];
    int64_t length = rows.length(s), shared = rows.shared(s), runs = work.runs(s);
    Parts common{tables}, own{room.mine()};
    float *flat = common.take(length * width), *pages = common.take(up(length, WIDE) * dim);
    float* values = common.take(length * width);
    float *asked = own.take(QUERIES * width), *scores = own.take(QUERIES * keys), *found = own.take(QUERIES * width);
    Range part(length, team);
    gather(key + kv * dim, key_stride, index + part.from, part.size(), dim, flat + part.from * width, width, 1.f);
    paged(flat + part.from * width, part.size(), dim, width, pages + part.from * dim);
    gather(value + kv * dim, value_stride, index + part.from, part.size(), dim, values + part.from * width, width, 1.f);
    team.meet();
    for (int64_t number = team.rank; number < share * runs; number += team.size) {
      Run run(number, runs, kv, share, shared, length);
      int64_t head = run.head, first = run.first, count = run.count;
      Seen seen(first, count, shape.window);
      int64_t low = seen.low, high = seen.high;
      gather(query + head * dim, query_stride, index + first, count, dim, asked, width, scale);
      fetch(out + head * dim, shape.heads * dim, index + first, count, dim);
      multiply(count, up(high - low, W), dim, asked, width, 1, pages + low * dim, dim * WIDE, WIDE, scores, keys);
      float totals[QUERIES];
      for (int64_t i = 0; i < count; i++) {
        float top = weigh(scores + i * keys, low, high, first + i, shape.window, totals + i);
        if (logs) logs[index[first + i] * shape.heads + head] = top + logf(totals[i]);
      }
      multiply(count, width, high - low, scores, keys, 1, values + low * width, WIDE, width, found, width);
      for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < dim; d += W)
          store_some(out + (index[first + i] * shape.heads + head) * dim + d, load(found + i * width + d) / totals[i],
                     dim - d);
    }
    team.meet();
  });
  return true;
}

// Gradients of keys and values are float32, (tokens, kv_heads, dim). `rest`, twice as many numbers as there are shared tokens
// of all sequences, kv_heads and dim, holds meanwhile what each sequence makes of those. A team's threads first have runs of
// queries each, for their gradients, and then keys each, to which all runs send theirs in order: weights are computed twice,
// but no thread waits for another run by run.
template <class T>
bool attend_back(const Rows& rows, const Shape& shape, const T* query, int64_t query_stride, const T* key,
                 int64_t key_stride, const T* value, int64_t value_stride, const T* out, const float* logs, const T* grad,
                 T* of_query, float* of_key, float* of_value, float* rest) {
  constexpr int64_t KEYS = 64;  // that a thread of a team has, beside the next one's
  Work work(rows, shape, 2);
  int64_t dim = shape.dim, width = up(dim, W), keys = up(work.longest(), WIDE), share = shape.share();
  int64_t row = shape.kv_heads * dim, others = rows.begins[rows.count] * row;
  int64_t desk = QUERIES * (3 * width + 2 * keys) + 128, table = 4 * width + 2 * dim;
  Room room(up(work.longest_together, WIDE) * table + 128, desk + up(work.longest_alone, WIDE) * table + 128,
            shape.threads);
  if (!room) return false;
  float scale = 1.f / sqrtf(float(dim));
  share_out(rows, shape, work, room, desk, [&](int64_t s, int64_t kv, Team team, float* tables) {
    const int64_t* index = rows.index + rows.starts[s];
    int64_t length = rows.length(s), shared = rows.shared(s), runs = work.runs(s);
    Parts common{tables}, own{room.mine()};
    float *flat = common.take(length * width), *pages = common.take(up(length, WIDE) * dim);
    float *values = common.take(length * width), *value_pages = common.take(up(length, WIDE) * dim);
    float *key_sums = common.take(length * width), *value_sums = common.take(length * width);
    float *asked = own.take(QUERIES * width), *above = own.take(QUERIES * width);
    float *weights = own.take(QUERIES * keys), *slopes = own.take(QUERIES * keys), *found = own.take(QUERIES * width);
    Range part(length, team);
    gather(key + kv * dim, key_stride, index + part.from, part.size(), dim, flat + part.from * width, width, 1.f);
    paged(flat + part.from * width, part.size(), dim, width, pages + part.from * dim);
    gather(value + kv * dim, value_stride, index + part.from, part.size(), dim, values + part.from * width, width, 1.f);
    paged(values + part.from * width, part.size(), dim, width, value_pages + part.from * dim);
    memset(key_sums + part.from * width, 0, sizeof(float) * part.size() * width);
    memset(value_sums + part.from * width, 0, sizeof(float) * part.size() * width);
    team.meet();
    // Weights of keys low..high, low a page's first, and the slopes of their scores.
    auto weigh_again = [&](const Run& run, int64_t low, int64_t high) {
      int64_t head = run.head, first = run.first, count = run.count, columns = up(high - low, W);
      gather(query + head * dim, query_stride, index + first, count, dim, asked, width, scale);
      gather(grad + head * dim, shape.heads * dim, index + first, count, dim, above, width, 1.f);
      fetch(out + head * dim, shape.heads * dim, index + first, count, dim);
      fetch(of_query + head * dim, shape.heads * dim, index + first, count, dim);
      multiply(count, columns, dim, asked, width, 1, pages + low * dim, dim * WIDE, WIDE, weights, keys);
      multiply(count, columns, dim, above, width, 1, value_pages + low * dim, dim * WIDE, WIDE, slopes, keys);
      for (int64_t i = 0; i < count; i++) {
        int64_t place = index[first + i] * shape.heads + head;
        vec products = {};
        for (int64_t d = 0; d < dim; d += W)
          products = fma(load(above + i * width + d), load_some(out + place * dim + d, dim - d), products);
        float mean = sum(products), log = logs[place];
        for (int64_t j = 0; j < columns; j += W) {
          float *weight = weights + i * keys + j, *slope = slopes + i * keys + j;
          vec p = hide(exponential(load(weight) - log), low + j, first + i, shape.window, 0);
          store(weight, p);
          store(slope, p * (load(slope) - mean));
        }
      }
    };
    auto to_query = [&](const Run& run, int64_t low, int64_t high) {
      multiply(run.count, width, high - low, slopes, keys, 1, flat + low * width, WIDE, width, found, width);
      for (int64_t i = 0; i < run.count; i++)
        for (int64_t d = 0; d < dim; d += W)
          store_some(of_query + (index[run.first + i] * shape.heads + run.head) * dim + d,
                     load(found + i * width + d) * scale, dim - d);
    };
    auto to_keys = [&](const Run& run, int64_t low, int64_t high) {
      multiply(high - low, width, run.count, slopes, 1, keys, asked, WIDE, width, key_sums + low * width, width, true);
      multiply(high - low, width, run.count, weights, 1, keys, above, WIDE, width, value_sums + low * width, width, true);
    };
    for (int64_t number = team.rank; number < share * runs; number += team.size) {
      Run run(number, runs, kv, share, shared, length);
      Seen seen(run.first, run.count, shape.window);
      if (number + 1 == share * runs) {
        fetch(of_key + kv * dim, row, index + shared, length - shared, dim);
        fetch(of_value + kv * dim, row, index + shared, length - shared, dim);
      }
      weigh_again(run, seen.low, seen.high);
      to_query(run, seen.low, seen.high);
      if (team.size == 1) to_keys(run, seen.low, seen.high);
    }
    for (int64_t from = team.rank * KEYS; from < length && team.size > 1; from += team.size * KEYS)
      for (int64_t number = 0; number < share * runs; number++) {
        Run run(number, runs, kv, share, shared, length);
        Seen seen(run.first, run.count, shape.window);
        int64_t low = from > seen.low ? from : seen.low, high = from + KEYS < seen.high ? from + KEYS : seen.high;
        if (low >= high) continue;
        weigh_again(run, low, high);
        to_keys(run, low, high);
      }
    team.meet();
    for (int64_t i = part.from; i < part.to; i++) {
      int64_t place = (i < shared ? rows.begins[s] + i : index[i]) * row + kv * dim;
      float *key_to = (i < shared ? rest : of_key) + place, *value_to = (i < shared ? rest + others : of_value) + place;
      for (int64_t d = 0; d < dim; d += W) {
        store_some(key_to + d, load(key_sums + i * width + d), dim - d);
        store_some(value_to + d, load(value_sums + i * width + d), dim - d);
      }
    }
    team.meet();
  });
  // In the sequences' order, whatever thread had them.
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (others > BLOCK)
  for (int64_t kv = 0; kv < shape.kv_heads; kv++)
    for (int64_t s = 0; s < rows.count; s++)
      for (int64_t i = 0; i < rows.shared(s); i++) {
        int64_t to = rows.index[rows.starts[s] + i] * row + kv * dim, from = (rows.begins[s] + i) * row + kv * dim;
        for (int64_t d = 0; d < dim; d++) {
          of_key[to + d] += rest[from + d];
          of_value[to + d] += rest[others + from + d];
        }
      }
  return true;
}

// A row c (n) = a (k) B (k, n), as `multiply`, which would wait for one sum after another. Panels of P x W columns go
// through k together.
template <int P, class T>
inline __attribute__((always_inline)) void strip(int64_t k, const float* a, const T* b, int64_t step, int64_t b_row,
                                                 float* c, const char*& later) {
  vec sums[P] = {};
  for (int64_t j = 0; j < k; j++) {
    fetch_lines<lines<T>(P)>(later, j);
    vec factor = splat(a[j]);
    for (int p = 0; p < P; p++) sums[p] = fma(factor, load(b + p / 2 * step + p % 2 * W + j * b_row), sums[p]);
  }
  for (int p = 0; p < P; p++) store(c + p * W, sums[p]);
  later += k * lines<T>(P) * LINE;
}

template <class T>
void multiply_row(int64_t n, int64_t k, const float* a, const T* b, int64_t b_panel, int64_t b_row, float* c,
                  const T* next) {
  const char* later = reinterpret_cast<const char*>(next);
  auto from = [=](int64_t column) { return b + column / WIDE * b_panel; };
  int64_t column = 0;
  for (; column + 8 * W <= n; column += 8 * W) strip<8>(k, a, from(column), b_panel, b_row, c + column, later);
  for (; column + 4 * W <= n; column += 4 * W) strip<4>(k, a, from(column), b_panel, b_row, c + column, later);
  for (; column + 2 * W <= n; column += 2 * W) strip<2>(k, a, from(column), b_panel, b_row, c + column, later);
  if (column < n) strip<1>(k, a, from(column), b_panel, b_row, c + column, later);
}

// Keys and values of sequences under way: keys (slots, kv_heads, pages, dim, WIDE), values (slots, kv_heads, length,
// width), where length = pages * WIDE and width is dim filled up to whole registers.
struct Cache {
  int64_t pages, width;
};

// One key head of a token is written.
template <class Q, class T>
void keep(const Shape& shape, const Cache& cache, int64_t slot, int64_t kv, int64_t position, const Q* key,
          const Q* value, T* keys, T* values) {
  int64_t dim = shape.dim, table = slot * shape.kv_heads + kv;
  T* page = keys + (table * cache.pages + position / WIDE) * dim * WIDE + position % WIDE;
  T* row = values + (table * cache.pages * WIDE + position) * cache.width;
  for (int64_t d = 0; d < dim; d++) put(page[d * WIDE], number(key[d]));
  for (int64_t d = 0; d < dim; d += W) store_some(row + d, load_some(value + d, dim - d), dim - d);
}

// Token i is written at `positions[i]` of slot `slots[i]`.
template <class T>
bool write(const Shape& shape, const Cache& cache, int64_t tokens, const int64_t* slots, const int64_t* positions,
           const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* keys, T* values) {
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (tokens * shape.kv_heads * shape.dim > BLOCK)
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t kv = 0; kv < shape.kv_heads; kv++)
      keep(shape, cache, slots[i], kv, positions[i], key + i * key_stride + kv * shape.dim,
           value + i * value_stride + kv * shape.dim, keys, values);
  return true;
}

// What `look` needs for any position.
inline int64_t look_floats(const Shape& shape, const Cache& cache) {
  int64_t most = cache.pages * WIDE, seen = shape.window < most ? shape.window + 2 * WIDE : most;
  return shape.share() * (2 * cache.width + up(seen, WIDE) + 1) + 64;
}

// A new token's queries of one key head, `share` of them, look at their slot up to the token itself. While keys are read
// values are fetched, and while these are, the keys that are read next: of the next head, or of the next slot's first.
template <class Q, class T, class O>
void look(const Shape& shape, const Cache& cache, int64_t slot, int64_t kv, int64_t position, const Q* query,
          const T* keys, const T* values, O* out, int64_t next_slot, float* room) {
  int64_t dim = shape.dim, width = cache.width, share = shape.share();
  int64_t table = slot * shape.kv_heads + kv;
  float scale = 1.f / sqrtf(float(dim));
  Seen seen(position, 1, shape.window);
  int64_t low = seen.low, columns = up(seen.high - low, W), stride = up(columns, WIDE);
  Parts own{room};
  float *asked = own.take(share * width), *scores = own.take(share * stride);
  float *found = own.take(share * width), *totals = own.take(share);
  for (int64_t h = 0; h < share; h++)
    for (int64_t d = 0; d < dim; d += W) store(asked + h * width + d, load_some(query + h * dim + d, dim - d) * scale);
  const T* pages = keys + (table * cache.pages + low / WIDE) * dim * WIDE;
  const T* rows = values + (table * cache.pages * WIDE + low) * width;
  int64_t next = kv + 1 < shape.kv_heads ? table + 1 : next_slot * shape.kv_heads;
  const T* later = keys + (next * cache.pages + low / WIDE) * dim * WIDE;
  if (share == 1)
    multiply_row(columns, dim, asked, pages, dim * WIDE, WIDE, scores, rows);
  else
    multiply<lines<T>(2)>(share, columns, dim, asked, width, 1, pages, dim * WIDE, WIDE, scores, stride, false, rows);
  for (int64_t h = 0; h < share; h++) weigh(scores + h * stride, low, seen.high, position, shape.window, totals + h);
  if (share == 1)
    multiply_row(width, seen.high - low, scores, rows, WIDE, width, found, later);
  else
    multiply<lines<T>(2)>(share, width, seen.high - low, scores, stride, 1, rows, WIDE, width, found, width, false, later);
  for (int64_t h = 0; h < share; h++)
    for (int64_t d = 0; d < dim; d += W)
      store_some(out + h * dim + d, load(found + h * width + d) / totals[h], dim - d);
}

// How many of so many heads of sequences a thread takes at once: neighbours share what is fetched, but none may idle.
inline int64_t taken(int64_t count, int64_t threads) {
  int64_t even = count / (4 * threads);
  return even < 1 ? 1 : even > 8 ? 8 : even;
}

// One new token of each of n sequences is written, and looks at its slot.
template <class T>
bool decode(const Shape& shape, const Cache& cache, int64_t n, const int64_t* slots, const int64_t* positions,
            const T* query, int64_t query_stride, const T* key, int64_t key_stride, const T* value, int64_t value_stride,
            T* keys, T* values, T* out) {
  int64_t dim = shape.dim, share = shape.share(), at_once = taken(n * shape.kv_heads, shape.threads);
  Room room(0, look_floats(shape, cache), shape.threads);
  if (!room) return false;
#pragma omp parallel for schedule(dynamic, at_once) collapse(2) num_threads(shape.threads)
  for (int64_t i = 0; i < n; i++)
    for (int64_t kv = 0; kv < shape.kv_heads; kv++) {
      int64_t slot = slots[i], position = positions[i];
      keep(shape, cache, slot, kv, position, key + i * key_stride + kv * dim, value + i * value_stride + kv * dim, keys,
           values);
      look(shape, cache, slot, kv, position, query + i * query_stride + kv * share * dim, keys, values,
           out + (i * shape.heads + kv * share) * dim, slots[i + 1 < n ? i + 1 : i], room.mine());
    }
  return true;
}

// x as a tensor of T holds it.
template <class T>
inline vec held(vec x) {
  T part[W];
  store(part, x);
  return load(part);
}

template <>
inline vec held<float>(vec x) {
  return x;
}

constexpr float GELU = 1.5957691216057308f, CUBE = 0.044715f * GELU;  // 2 sqrt(2 / pi)

// GELU in its tanh form is x sigmoid(z), z = GELU x + CUBE x^3.
inline vec gelu_gate(vec x) { return sigmoid(x * fma(x * x, splat(CUBE), splat(GELU))); }

// The normal distribution's share up to x, by which exact GELU multiplies x: half the complementary error function of
// -x / sqrt 2, to 2e-7 of it in both tails (Chebyshev's fit of Numerical Recipes, 6.2).
inline vec normal_share(vec x) {
  vec z = larger(x, -x) * 0.70710678118654752f, t = 1.f / fma(z, splat(0.5f), splat(1.f)), p = splat(0.17087277f);
  for (float term : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                     1.00002368f, -1.26551223f})
    p = fma(p, t, splat(term));
  vec beyond = 0.5f * t * exponential(fma(-z, z, p));
  return x < vec{} ? beyond : 1.f - beyond;
}

enum Activation : int64_t { RELU, GELU_TANH, SILU, GELU_EXACT };

// What activation multiplies x by.
inline vec gate(vec x, int64_t activation) {
  return activation == SILU ? sigmoid(x) : activation == GELU_TANH ? gelu_gate(x) : normal_share(x);
}

// And the slope of the product: s + x s (1 - s) z' for a sigmoid s of z; for exact GELU s + x times the normal density.
inline vec slope(vec x, vec s, int64_t activation) {
  if (activation == GELU_EXACT) return fma(x * 0.3989422804014327f, exponential(-0.5f * x * x), s);
  vec inner = activation == SILU ? splat(1.f) : x * x * (3.f * CUBE) + GELU;
  return s + x * s * (1.f - s) * inner;
}

// x / sqrt(mean(x^2) + eps) * weight, or of x less its mean, + bias; returns by what the row was scaled.
template <class X, class T, class Y>
inline float norm_row(int64_t width, bool centred, float eps, const X* x, const T* weight, const T* bias, Y* to) {
  float mean = 0;
  if (centred) {
    vec total = {};
    for (int64_t i = 0; i < width; i += W) total += load_some(x + i, width - i);
    mean = sum(total) / float(width);
  }
  vec squares = {};
  for (int64_t i = 0; i < width; i += W) {
    vec part = load_some(x + i, width - i) - mean;
    for (int64_t j = width - i; j < W; j++) part[j] = 0;
    squares = fma(part, part, squares);
  }
  float scale = 1.f / sqrtf(sum(squares) / float(width) + eps);
  for (int64_t i = 0; i < width; i += W) {
    vec y = (load_some(x + i, width - i) - mean) * scale * load_some(weight + i, width - i);
    store_some(to + i, held<T>(bias ? y + load_some(bias + i, width - i) : y), width - i);
  }
  return scale;
}

// Channel pairs (i, i + half) of one head are turned by a token's angles, or back; in place too.
template <class X, class T>
inline void turn(const X* x, int64_t half, const T* cosines, const T* sines, bool back, X* to) {
  for (int64_t i = 0; i < half; i += W) {
    vec c = load_some(cosines + i, half - i), s = load_some(sines + i, half - i) * (back ? -1.f : 1.f);
    vec a = load_some(x + i, half - i), b = load_some(x + half + i, half - i);
    store_some(to + i, held<T>(a * c - b * s), half - i);
    store_some(to + half + i, held<T>(b * c + a * s), half - i);
  }
}

// An activation of each entry, and its slope there.
template <class T>
bool activate(int64_t count, const T* from, T* to, T* slopes, int64_t activation, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count > BLOCK)
  for (int64_t block = 0; block < count; block += BLOCK) {
    int64_t end = block + BLOCK < count ? block + BLOCK : count;
    for (int64_t i = block; i < end; i += W) {
      vec x = load_some(from + i, end - i), s = gate(x, activation);
      store_some(to + i, x * s, end - i);
      if (slopes) store_some(slopes + i, slope(x, s, activation), end - i);
    }
  }
  return true;
}

// silu(gate) * up for rows (gate, up).
template <class T>
bool swiglu(int64_t rows, int64_t width, const T* from, T* to, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > BLOCK)
  for (int64_t row = 0; row < rows; row++) {
    const T *gate = from + row * 2 * width, *more = gate + width;
    for (int64_t i = 0; i < width; i += W) {
      vec x = load_some(gate + i, width - i);
      store_some(to + row * width + i, x * sigmoid(x) * load_some(more + i, width - i), width - i);
    }
  }
  return true;
}

template <class T>
bool swiglu_back(int64_t rows, int64_t width, const T* from, const T* grad, T* to, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > BLOCK)
  for (int64_t row = 0; row < rows; row++) {
    const T *gate = from + row * 2 * width, *more = gate + width;
    T *of_gate = to + row * 2 * width, *of_more = of_gate + width;
    for (int64_t i = 0; i < width; i += W) {
      vec x = load_some(gate + i, width - i), above = load_some(grad + row * width + i, width - i), s = sigmoid(x);
      store_some(of_more + i, above * x * s, width - i);
      store_some(of_gate + i, above * load_some(more + i, width - i) * s * (1.f + x * (1.f - s)), width - i);
    }
  }
  return true;
}

template <class T>
bool rotate(int64_t tokens, int64_t heads, int64_t half, const T* from, int64_t stride, const T* cosines, const T* sines,
            T* to, int64_t back, int64_t threads) {
  int64_t dim = 2 * half;
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * heads * dim > BLOCK)
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t head = 0; head < heads; head++)
      turn(from + token * stride + head * dim, half, cosines + token * half, sines + token * half, back,
           to + (token * heads + head) * dim);
  return true;
}

template <class T>
bool rms_norm(int64_t rows, int64_t width, const T* from, const T* weight, float eps, T* to, float* scales,
              int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > BLOCK)
  for (int64_t row = 0; row < rows; row++) {
    float scale = norm_row<T, T>(width, false, eps, from + row * width, weight, nullptr, to + row * width);
    if (scales) scales[row] = scale;
  }
  return true;
}

// With n = x scale and g = grad weight: scale (g - n mean(g n)). The weight gets the sum of grad n: of each of PARTS runs of
// rows by itself, whatever thread has it, and of these in order.
template <class T>
bool rms_norm_back(int64_t rows, int64_t width, const T* from, const T* weight, const float* scales, const T* grad, T* to,
                   float* parts, int64_t threads) {
  int64_t run = (rows + PARTS - 1) / PARTS;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > BLOCK)
  for (int64_t part = 0; part < PARTS; part++) {
    float* of_weight = parts + part * width;
    memset(of_weight, 0, sizeof(float) * width);
    for (int64_t row = part * run; row < rows && row < (part + 1) * run; row++) {
      const T *x = from + row * width, *above = grad + row * width;
      float scale = scales[row];
      vec products = {};
      for (int64_t i = 0; i < width; i += W) {
        vec n = load_some(x + i, width - i) * scale, g = load_some(above + i, width - i);
        store_some(of_weight + i, load_some(of_weight + i, width - i) + g * n, width - i);
        products += g * load_some(weight + i, width - i) * n;
      }
      float mean = sum(products) / float(width);
      for (int64_t i = 0; i < width; i += W) {
        vec n = load_some(x + i, width - i) * scale;
        vec g = load_some(above + i, width - i) * load_some(weight + i, width - i);
        store_some(to + row * width + i, (g - n * mean) * scale, width - i);
      }
    }
  }
  for (int64_t part = 1; part < PARTS; part++)
    for (int64_t i = 0; i < width; i += W)
      store_some(parts + i, load_some(parts + i, width - i) + load_some(parts + part * width + i, width - i), width - i);
  return true;
}

// Whole steps of decoding. Between operations numbers are float32 that hold what a tensor of T would. Tensors' rows are filled
// up to whole panels, and weights lie in panels (panels, inner, WIDE); of a gated MLP each panel is W columns of the gate
// beside the W that it gates. Adapters add `high` (columns, rank) times `low` (rank, inner) times the row.
template <class T>
struct Linear {
  const T *weight, *bias, *low, *high;
  int64_t rank;
};

template <class T>
struct Layer {
  const T *norm, *norm_bias;
  Linear<T> qkv;
  const T *query_norm, *key_norm;
  Linear<T> out;
  const T *mlp_norm, *mlp_norm_bias;
  Linear<T> up, down;
};

template <class T>
struct Tables {
  T *keys, *values;
};

template <class T>
struct Model {
  int64_t layers, width, inner, vocabulary, rank, layer_norm, activation, gated;  // rank: of the linear layer with most
  float eps;
  const T *norm, *norm_bias, *head, *head_bias;
};

inline vec activated(vec x, int64_t activation) {
  if (activation == RELU) return x < vec{} ? vec{} : x;
  return x * gate(x, activation);
}

// Inside a parallel region: rows of x are normed.
template <class T>
inline void norm_rows(const Model<T>& model, int64_t n, const float* x, int64_t x_stride, const T* weight, const T* bias,
                      Left<T>* to, int64_t to_stride) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < n; row++)
    norm_row(model.width, model.layer_norm, model.eps, x + row * x_stride, weight, bias, to + row * to_stride);
}

// Inside a parallel region: `end` gets the sums of A (n, inner) times panels, ROWS rows at once.
template <int64_t ROWS = 96, class T, class End>
inline void share_product(int64_t n, int64_t inner, int64_t columns, const Left<T>* a, int64_t stride, const T* weight,
                          const End& end) {
  alignas(64) float kept[MATRICES ? ROWS * WIDE : 1];
#pragma omp for schedule(static) collapse(2)
  for (int64_t column = 0; column < columns; column += WIDE)
    for (int64_t row = 0; row < n; row += ROWS)
      whole_panel(n - row < ROWS ? n - row : ROWS, inner, a + row * stride, stride, weight + column * inner, kept, row,
                  column, end);
}

template <class T>
inline vec shifted(vec x, const T* bias, int64_t column) {
  return held<T>(bias ? x + load(bias + column) : x);
}

template <class T>
inline void hold(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += W) store_some(x + i, held<T>(load_some(x + i, count - i)), count - i);
}

// A row of a product's left side from a column on.
template <class T>
inline void feed(Left<T>* to, vec x) {
  store(to, held<T>(x));
}

// Two registers of a row of A (k) times a panel.
template <class T>
inline void row_product(int64_t k, const Left<T>* a, const T* panel, vec* sums) {
  sums[0] = sums[1] = vec{};
  if constexpr (std::is_same_v<Left<T>, bf16>)
    for (int64_t j = 0; j < k; j += 2)
      for (int v = 0; v < 2; v++) {
        int32_t pair;
        ints entries;
        memcpy(&pair, a + j, sizeof pair);
        memcpy(&entries, panel + j * WIDE + v * 2 * W, sizeof entries);
        sums[v] = fma_pairs(pair - ints{}, entries, sums[v]);
      }
  else
    for (int64_t j = 0; j < k; j++)
      for (int v = 0; v < 2; v++) sums[v] = fma(splat(a[j]), load(panel + j * WIDE + v * W), sums[v]);
}

// Inside a parallel region: `end` gets two registers of a linear layer's output, rounded where training rounds. What `low`
// gives is written after the rows of A; it has few columns, so more runs of rows share it out.
template <class T, class End>
inline void share_linear(int64_t n, int64_t inner, int64_t columns, Left<T>* a, int64_t stride, const Linear<T>& linear,
                         const End& end) {
  if (linear.rank)
    share_product<24>(n, inner, linear.rank, a, stride, linear.low, [=](int64_t row, int64_t column, const vec* sums, int) {
      for (int v = 0; v < 2; v++) feed<T>(a + row * stride + inner + column + v * W, sums[v]);
    });
  share_product(n, inner, columns, a, stride, linear.weight, [=](int64_t row, int64_t column, const vec* sums, int) {
    vec own[2], more[2];
    for (int v = 0; v < 2; v++) own[v] = shifted(sums[v], linear.bias, column + v * W);
    if (linear.rank) {
      row_product<T>(linear.rank, a + row * stride + inner, linear.high + column * linear.rank, more);
      for (int v = 0; v < 2; v++) own[v] = held<T>(own[v] + held<T>(more[v]));
    }
    end(row, column, own);
  });
}

// x (n, width) are the embedded tokens, and what the layers make of them; logits (n, vocabulary). `room` holds three tensors
// of n rows: normed, projected, attended or activated.
template <class T>
bool step(const Model<T>& model, const Layer<T>* layers, const Tables<T>* tables, const Shape& shape, const Cache& cache,
          int64_t n, const int64_t* slots, const int64_t* positions, const T* cosines, const T* sines, float* x,
          float* room, float* logits) {
  Room desks(0, look_floats(shape, cache), shape.threads);
  if (!desks) return false;
  int64_t dim = shape.dim, share = shape.share(), queries = shape.heads * dim, half = dim / 2;
  int64_t width = up(model.width, WIDE), projected = up(queries + 2 * shape.kv_heads * dim, WIDE);
  int64_t inner = up(model.inner, WIDE), spare = up(model.rank, WIDE), across = width + spare;
  int64_t wide = spare + (inner > up(queries, WIDE) ? inner : up(queries, WIDE));
  float* qkv = room + n * across;
  Left<T> *normed = reinterpret_cast<Left<T>*>(room), *middle = reinterpret_cast<Left<T>*>(qkv + n * projected);
  int64_t at_once = taken(n * shape.kv_heads, shape.threads);
#pragma omp parallel num_threads(shape.threads)
  {
    const Tables<T>* kept = tables;
    for (const Layer<T>* layer = layers; layer < layers + model.layers; layer++, kept++) {
      auto add = [=](int64_t row, int64_t column, const vec* out) {
        for (int v = 0; v < 2; v++) {
          float* to = x + row * width + column + v * W;
          store(to, held<T>(load(to) + out[v]));
        }
      };
      norm_rows(model, n, x, width, layer->norm, layer->norm_bias, normed, across);
      share_linear(n, model.width, projected, normed, across, layer->qkv,
                   [=](int64_t row, int64_t column, const vec* out) {
                     for (int v = 0; v < 2; v++) store(qkv + row * projected + column + v * W, out[v]);
                   });
#pragma omp for schedule(dynamic, at_once) collapse(2)
      for (int64_t i = 0; i < n; i++)
        for (int64_t kv = 0; kv < shape.kv_heads; kv++) {
          float *query = qkv + i * projected + kv * share * dim, *key = qkv + i * projected + queries + kv * dim;
          Left<T>* attended = middle + i * wide + kv * share * dim;
          if (layer->query_norm) {
            for (int64_t h = 0; h < share; h++)
              norm_row<float, T>(dim, false, model.eps, query + h * dim, layer->query_norm, nullptr, query + h * dim);
            norm_row<float, T>(dim, false, model.eps, key, layer->key_norm, nullptr, key);
          }
          if (cosines) {
            for (int64_t h = 0; h < share; h++)
              turn(query + h * dim, half, cosines + i * half, sines + i * half, false, query + h * dim);
            turn(key, half, cosines + i * half, sines + i * half, false, key);
          }
          keep(shape, cache, slots[i], kv, positions[i], key, key + shape.kv_heads * dim, kept->keys, kept->values);
          look(shape, cache, slots[i], kv, positions[i], query, kept->keys, kept->values, attended,
               slots[i + 1 < n ? i + 1 : i], desks.mine());
          if constexpr (std::is_same_v<Left<T>, float>) hold<T>(attended, share * dim);
        }
      share_linear(n, queries, width, middle, wide, layer->out, add);
      norm_rows(model, n, x, width, layer->mlp_norm, layer->mlp_norm_bias, normed, across);
      share_linear(n, model.width, model.gated ? 2 * inner : inner, normed, across, layer->up,
                   [=](int64_t row, int64_t column, const vec* out) {
                     vec first = activated(out[0], model.activation);
                     if (model.gated) return feed<T>(middle + row * wide + column / 2, first * out[1]);
                     feed<T>(middle + row * wide + column, first);
                     feed<T>(middle + row * wide + column + W, activated(out[1], model.activation));
                   });
      share_linear(n, model.inner, width, middle, wide, layer->down, add);
    }
    norm_rows(model, n, x, width, model.norm, model.norm_bias, normed, across);
    share_product(n, model.width, up(model.vocabulary, WIDE), normed, across, model.head,
                  [=](int64_t row, int64_t column, const vec* sums, int) {
                    for (int64_t place = column, v = 0; v < 2 && place < model.vocabulary; place += W, v++)
                      store_some(logits + row * model.vocabulary + place, shifted(sums[v], model.head_bias, place),
                                 model.vocabulary - place);
                  });
    if (std::is_same_v<T, bf16> && matrices_lent()) matrices_left();
  }
  return true;
}

// Panel p of weight (rows, inner): see `pack`.
template <class T>
inline void pack_panel(int64_t p, int64_t rows, int64_t inner, const T* weight, T* to, int64_t gated, int64_t pairs) {
  int64_t half = rows / 2, wide = pairs ? 2 : 1;
  const T* from[WIDE];
  for (int64_t c = 0; c < WIDE; c++) {
    int64_t place = gated ? p * W + c % W : p * WIDE + c, row = gated && c >= W ? half + place : place;
    from[c] = place < (gated ? half : rows) ? weight + row * inner : nullptr;
  }
  for (int64_t j = 0; j < inner; j += wide)
    for (int64_t c = 0; c < WIDE; c++, to += wide) {
      if (!from[c])
        memset(to, 0, sizeof(T) * wide);
      else if (pairs)
        memcpy(to, from[c] + j, sizeof(T) * 2);
      else
        *to = from[c][j];
    }
}

// weight (rows, inner) into panels (panels, inner, WIDE), the last one filled up with zeros; `gated`: W of the first half of
// the rows beside W of the second; `pairs`: (panels, inner / 2, WIDE, 2), inner even.
template <class T>
bool pack(int64_t rows, int64_t inner, const T* weight, T* to, int64_t gated, int64_t pairs, int64_t threads) {
  int64_t panels = gated ? up(rows / 2, WIDE) / W : up(rows, WIDE) / WIDE;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t p = 0; p < panels; p++) pack_panel(p, rows, inner, weight, to + p * inner * WIDE, gated, pairs);
  return true;
}

// to (n, columns) gets A (n, inner) times weight (columns, inner) transposed, plus bias, each row as if it were alone. Not for
// bfloat16 without products of pairs.
template <class T>
bool product(int64_t n, int64_t inner, int64_t columns, const T* a, int64_t stride, const T* weight, const T* bias, T* to,
             int64_t threads) {
  constexpr int64_t ROWS = 1024;
  if constexpr (std::is_same_v<Left<T>, T>) {
    Room room(0, (inner + ROWS) * WIDE + 64, threads);
    if (!room) return false;
#pragma omp parallel num_threads(threads) if (n * columns > BLOCK)
    {
#pragma omp for schedule(dynamic) collapse(2)
      for (int64_t column = 0; column < columns; column += WIDE)
        for (int64_t row = 0; row < n; row += ROWS) {
          Parts part{room.mine()};
          float* kept = part.take(ROWS * WIDE);
          T* entries = reinterpret_cast<T*>(part.take(inner * WIDE));
          pack_panel(column / WIDE, columns, inner, weight, entries, 0, sizeof(T) == 2);
          vec shifts[2] = {};
          int64_t beside = columns - column;
          for (int v = 0; bias && v < 2 && v * W < beside; v++) shifts[v] = load_some(bias + column + v * W, beside - v * W);
          whole_panel(n - row < ROWS ? n - row : ROWS, inner, a + row * stride, stride, (const T*)entries, kept, row, column,
                      [=](int64_t i, int64_t first, const vec* sums, int) {
                        T* place = to + i * columns + first;
                        if (beside >= WIDE) {
                          store(place, sums[0] + shifts[0]);
                          store(place + W, sums[1] + shifts[1]);
                        } else {
                          store_some(place, sums[0] + shifts[0], beside);
                          if (beside > W) store_some(place + W, sums[1] + shifts[1], beside - W);
                        }
                      });
        }
      if (std::is_same_v<T, bf16> && matrices_lent()) matrices_left();
    }
  }
  return true;
}

// Whether products, and what else takes instructions of its own, come out as they must: small whole numbers, which are exact.
template <class T>
bool sound() {
  constexpr int64_t N = 35, INNER = 70, COLUMNS = WIDE + 3;
  static T a[N * INNER], weight[COLUMNS * INNER], to[N * COLUMNS];
  for (int64_t i = 0; i < N * INNER; i++) put(a[i], float(i % 5 - 2));
  for (int64_t i = 0; i < COLUMNS * INNER; i++) put(weight[i], float(i % 3 - 1));
  if (!product<T>(N, INNER, COLUMNS, a, INNER, weight, nullptr, to, 1)) return false;
  for (int64_t i = 0; i < N && std::is_same_v<Left<T>, T>; i++)
    for (int64_t j = 0; j < COLUMNS; j++) {
      float expected = 0;
      for (int64_t k = 0; k < INNER; k++) expected += number(a[i * INNER + k]) * number(weight[j * INNER + k]);
      if (number(to[i * COLUMNS + j]) != expected) return false;
    }
  for (int64_t i = 0; i < N; i++) put(a[i], float(i));
  activate<T>(N, a, to, nullptr, GELU_TANH, 1);
  for (int64_t i = 0; i < N; i++)
    if (fabsf(number(to[i]) - float(i) / (1.f + expf(-GELU * i - CUBE * i * i * i))) > i / 100.f) return false;
  return true;
}

}  // namespace

// What the package may rely on: see calls.py and library.py.
extern "C" int64_t page_positions() { return WIDE; }
extern "C" int64_t register_numbers() { return W; }
extern "C" int64_t parts_of_sums() { return PARTS; }
extern "C" int64_t pairs_of_halves() { return PAIRS; }
extern "C" int64_t matrices_of_halves() { return matrices_lent(); }
extern "C" int64_t sound_here() { return sound<float>() && sound<bf16>(); }

// Whether every number is at least 0 and less than `limit`, and none less than the one before it where they are to rise.
extern "C" int64_t within(const int64_t* numbers, int64_t count, int64_t limit, int64_t rising) {
  bool found = true;
  for (int64_t i = 0; i < count; i++) found &= uint64_t(numbers[i]) < uint64_t(limit);
  for (int64_t i = 1; rising && i < count; i++) found &= numbers[i - 1] <= numbers[i];
  return found;
}

// See compute/digest.py: each number times its factor, pieces' sums times powers of `base` so that the last has the 0th, all
// modulo 2^64. Rows begin `width` numbers apart in the whole of `count`, and `stride` apart here. Whole numbers: any order of
// additions gives the same.
extern "C" int64_t weighted_sum(const int32_t* bits, const int32_t* factors, uint64_t* sum, int64_t rows, int64_t columns,
                                int64_t stride, int64_t width, int64_t first, int64_t count, int64_t piece, uint64_t base,
                                int64_t threads) {
  int64_t strips = columns / piece + 2;  // of a row, each within one piece
  uint64_t total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : total) if (rows * columns > BLOCK)
  for (int64_t s = 0; s < rows * strips; s++) {
    int64_t start = first + s / strips * width, p = start / piece + s % strips;
    int64_t from = std::max(start, p * piece), to = std::min(start + columns, (p + 1) * piece);
    if (from >= to) continue;
    const int32_t* here = bits + s / strips * stride + (from - start);
    const int32_t* theirs = factors + (from - p * piece);
    uint64_t found = 0, power = base, weight = 1;
    for (int64_t i = 0; i < to - from; i++) found += (uint64_t)((int64_t)here[i] * theirs[i]);
    for (int64_t left = (count - 1) / piece - p; left; left >>= 1, power *= power)
      if (left & 1) weight *= power;
    total += found * weight;
  }
  *sum = total;
  return true;
}

// Every kernel of numbers is there for both kinds of numbers. Arguments are addresses and then numbers, in the order of their
// declarations in calls.py.
#define KERNEL(NAME, PARAMETERS, ARGUMENTS)                                                \
  extern "C" int64_t NAME##_float PARAMETERS { typedef float T; return NAME<T> ARGUMENTS; } \
  extern "C" int64_t NAME##_bf16 PARAMETERS { typedef bf16 T; return NAME<T> ARGUMENTS; }

KERNEL(attend,
       (const int64_t* index, const int64_t* starts, const int64_t* begins, const void* query, const void* key,
        const void* value, void* out, float* logs, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim,
        int64_t query_stride, int64_t key_stride, int64_t value_stride, int64_t window, int64_t threads),
       (Rows{index, starts, begins, sequences}, Shape{heads, kv_heads, dim, window, threads}, (const T*)query, query_stride,
        (const T*)key, key_stride, (const T*)value, value_stride, (T*)out, logs))

KERNEL(attend_back,
       (const int64_t* index, const int64_t* starts, const int64_t* begins, const void* query, const void* key,
        const void* value, const void* out, const float* logs, const void* grad, void* of_query, float* of_key,
        float* of_value, float* rest, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t query_stride,
        int64_t key_stride, int64_t value_stride, int64_t window, int64_t threads),
       (Rows{index, starts, begins, sequences}, Shape{heads, kv_heads, dim, window, threads}, (const T*)query, query_stride,
        (const T*)key, key_stride, (const T*)value, value_stride, (const T*)out, logs, (const T*)grad, (T*)of_query, of_key,
        of_value, rest))

KERNEL(write,
       (const int64_t* slots, const int64_t* positions, const void* key, const void* value, void* keys, void* values,
        int64_t tokens, int64_t kv_heads, int64_t dim, int64_t key_stride, int64_t value_stride, int64_t pages,
        int64_t width, int64_t threads),
       (Shape{kv_heads, kv_heads, dim, 1, threads}, Cache{pages, width}, tokens, slots, positions, (const T*)key, key_stride,
        (const T*)value, value_stride, (T*)keys, (T*)values))

KERNEL(decode,
       (const int64_t* slots, const int64_t* positions, const void* query, const void* key, const void* value, void* keys,
        void* values, void* out, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t query_stride,
        int64_t key_stride, int64_t value_stride, int64_t pages, int64_t width, int64_t window, int64_t threads),
       (Shape{heads, kv_heads, dim, window, threads}, Cache{pages, width}, n, slots, positions, (const T*)query, query_stride,
        (const T*)key, key_stride, (const T*)value, value_stride, (T*)keys, (T*)values, (T*)out))

KERNEL(step,
       (const void* layers, const void* norm, const void* norm_bias, const void* head, const void* head_bias,
        const int64_t* slots, const int64_t* positions, const void* cosines, const void* sines, const void* tables,
        const void*, const void*, float* x, float* room, float* logits, int64_t n, int64_t depth, int64_t width,
        int64_t inner, int64_t vocabulary, int64_t rank, int64_t heads, int64_t kv_heads, int64_t dim, int64_t pages,
        int64_t value_width, int64_t window, int64_t layer_norm, int64_t activation, int64_t gated, double eps,
        int64_t threads),
       (Model<T>{depth, width, inner, vocabulary, rank, layer_norm, activation, gated, float(eps), (const T*)norm,
                 (const T*)norm_bias, (const T*)head, (const T*)head_bias},
        (const Layer<T>*)layers, (const Tables<T>*)tables, Shape{heads, kv_heads, dim, window, threads},
        Cache{pages, value_width}, n, slots, positions, (const T*)cosines, (const T*)sines, x, room, logits))

KERNEL(pack,
       (const void* weight, void* to, int64_t rows, int64_t inner, int64_t gated, int64_t pairs, int64_t threads),
       (rows, inner, (const T*)weight, (T*)to, gated, pairs, threads))

KERNEL(product,
       (const void* x, const void* weight, const void* bias, void* to, int64_t n, int64_t inner, int64_t columns,
        int64_t stride, int64_t threads),
       (n, inner, columns, (const T*)x, stride, (const T*)weight, (const T*)bias, (T*)to, threads))

KERNEL(activate,
       (const void* from, void* to, void* slopes, int64_t count, int64_t activation, int64_t threads),
       (count, (const T*)from, (T*)to, (T*)slopes, activation, threads))

KERNEL(swiglu, (const void* from, void* to, int64_t rows, int64_t width, int64_t threads),
       (rows, width, (const T*)from, (T*)to, threads))

KERNEL(swiglu_back, (const void* from, const void* grad, void* to, int64_t rows, int64_t width, int64_t threads),
       (rows, width, (const T*)from, (const T*)grad, (T*)to, threads))

KERNEL(rotate,
       (const void* from, const void* cosines, const void* sines, void* to, int64_t tokens, int64_t heads, int64_t half,
        int64_t stride, int64_t back, int64_t threads),
       (tokens, heads, half, (const T*)from, stride, (const T*)cosines, (const T*)sines, (T*)to, back, threads))

KERNEL(rms_norm,
       (const void* from, const void* weight, void* to, float* scales, int64_t rows, int64_t width, double eps,
        int64_t threads),
       (rows, width, (const T*)from, (const T*)weight, float(eps), (T*)to, scales, threads))

KERNEL(rms_norm_back,
       (const void* from, const void* weight, const float* scales, const void* grad, void* to, float* parts, int64_t rows,
        int64_t width, int64_t threads),
       (rows, width, (const T*)from, (const T*)weight, scales, (const T*)grad, (T*)to, parts, threads))
