// Attention of a few queries over keys and values in blocks of a pool, read where they lie.
//
// A task is one line of a block table. Its queries see the rows `first .. used` of the line; row i
// lies in the pool at slot table[i / block_size] * block_size + i % block_size. Keys are taken in
// pieces of at most PIECE rows with an online softmax. The pieces are counted from `first`, so a
// result depends neither on which blocks a sequence has, nor on other tasks, nor on the threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t PIECE = 128;

struct Bfloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};

inline void store(float value, float *to) { *to = value; }

inline void store(float value, Bfloat16 *to) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    // To the nearest, ties to even; a NaN stays one.
    to->bits = std::isnan(value) ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
}

// exp of numbers up to 0, within a few units in the last place; NaN stays NaN.
inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

struct Tasks {
    const int32_t *table;
    int64_t columns;
    const int64_t *first, *used;
    const int32_t *queries;
    int64_t count, block_size;
};

struct Shape {
    int64_t heads, kv_heads, dim;
    float scale, cap;
};

template <typename T> struct Rows {
    T *data;
    int64_t stride;
    T *at(int64_t row, int64_t head, int64_t dim) const { return data + row * stride + head * dim; }
};

template <typename T, int DIM>
void attend(const Tasks &tasks, const Shape &shape, Rows<const T> q, Rows<const T> k,
            Rows<const T> v, Rows<T> out, Rows<float> lse, int64_t task, int64_t kv_head) {
    const int64_t dim = DIM ? DIM : shape.dim, group = shape.heads / shape.kv_heads;
    std::vector<float> memory(group * (2 * dim + PIECE + 2) + dim);
    float *query = memory.data(), *sum = query + group * dim, *score = sum + group * dim;
    float *most = score + group * PIECE, *total = most + group, *row = total + group;
    const int32_t *blocks = tasks.table + task * tasks.columns;
    const int64_t first = tasks.first[task], used = tasks.used[task];
    for (int64_t at = tasks.queries[task]; at < tasks.queries[task + 1]; ++at) {
        const T *from = q.at(at, kv_head * group, dim);
        for (int64_t i = 0; i < group * dim; ++i) {
            query[i] = from[i] * shape.scale;
            sum[i] = 0.0f;
        }
        std::fill(most, most + group, -INFINITY);
        std::fill(total, total + group, 0.0f);
        for (int64_t begin = first; begin < used; begin += PIECE) {
            const int64_t end = std::min(begin + PIECE, used), count = end - begin;
            auto slot = [&](int64_t i) {
                return blocks[i / tasks.block_size] * tasks.block_size + i % tasks.block_size;
            };
            for (int64_t i = begin; i < end; ++i) {
                const T *key = k.at(slot(i), kv_head, dim);
                for (int64_t d = 0; d < dim; ++d) row[d] = key[d];
                for (int64_t g = 0; g < group; ++g) {
                    const float *mine = query + g * dim;
                    float dot = 0.0f;
                    for (int64_t d = 0; d < dim; ++d) dot += mine[d] * row[d];
                    score[g * PIECE + i - begin] = dot;
                }
            }
            for (int64_t g = 0; g < group; ++g) {
                float *mine = score + g * PIECE, high = most[g];
                if (shape.cap > 0.0f)
                    for (int64_t i = 0; i < count; ++i)
                        mine[i] = shape.cap * std::tanh(mine[i] / shape.cap);
                for (int64_t i = 0; i < count; ++i) high = mine[i] > high ? mine[i] : high;
                const float keep = most[g] == -INFINITY ? 0.0f : exp_of(most[g] - high);
                float added = 0.0f;
                for (int64_t i = 0; i < count; ++i) {
                    mine[i] = exp_of(mine[i] - high);
                    added += mine[i];
                }
                most[g] = high;
                total[g] = total[g] * keep + added;
                for (int64_t d = 0; d < dim; ++d) sum[g * dim + d] *= keep;
            }
            for (int64_t i = begin; i < end; ++i) {
                const T *value = v.at(slot(i), kv_head, dim);
                for (int64_t d = 0; d < dim; ++d) row[d] = value[d];
                for (int64_t g = 0; g < group; ++g) {
                    const float weight = score[g * PIECE + i - begin];
                    float *mine = sum + g * dim;
                    for (int64_t d = 0; d < dim; ++d) mine[d] += weight * row[d];
                }
            }
        }
        for (int64_t g = 0; g < group; ++g) {
            const bool any = first < used;
            T *to = out.at(at, kv_head * group + g, dim);
            const float share = any ? 1.0f / total[g] : 0.0f;
            for (int64_t d = 0; d < dim; ++d) store(sum[g * dim + d] * share, to + d);
            *lse.at(at, kv_head * group + g, 1) = any ? most[g] + std::log(total[g]) : -INFINITY;
        }
    }
}

template <typename T>
void run(const Tasks &tasks, const Shape &shape, const void *q, int64_t q_stride, const void *k,
         const void *v, int64_t k_stride, int64_t v_stride, void *out, int64_t out_stride,
         float *lse, int64_t lse_stride, int64_t threads) {
    const Rows<const T> queries{static_cast<const T *>(q), q_stride};
    const Rows<const T> keys{static_cast<const T *>(k), k_stride};
    const Rows<const T> values{static_cast<const T *>(v), v_stride};
    const Rows<T> outputs{static_cast<T *>(out), out_stride};
    // Loops of a known length are faster.
    auto one = shape.dim == 128  ? attend<T, 128>
               : shape.dim == 64 ? attend<T, 64>
               : shape.dim == 32 ? attend<T, 32>
                                 : attend<T, 0>;
    const int64_t pairs = tasks.count * shape.kv_heads;
    auto some = [&](int64_t begin) {
        for (int64_t pair = begin; pair < pairs; pair += threads)
            one(tasks, shape, queries, keys, values, outputs, {lse, lse_stride},
                pair / shape.kv_heads, pair % shape.kv_heads);
    };
    std::vector<std::thread> others;
    for (int64_t number = 1; number < threads; ++number) others.emplace_back(some, number);
    some(0);
    for (auto &other : others) other.join();
}

}  // namespace

extern "C" void distca_attend_paged(
    int bfloat16, const void *q, int64_t q_stride, const void *k, const void *v, int64_t k_stride,
    int64_t v_stride, void *out, int64_t out_stride, float *lse, int64_t lse_stride,
    const int32_t *table, int64_t columns, const int64_t *first, const int64_t *used,
    const int32_t *queries, int64_t count, int64_t block_size, int64_t heads, int64_t kv_heads,
    int64_t dim, float scale, float cap, int64_t threads) {
    const Tasks tasks{table, columns, first, used, queries, count, block_size};
    const Shape shape{heads, kv_heads, dim, scale, cap};
    (bfloat16 ? run<Bfloat16> : run<float>)(tasks, shape, q, q_stride, k, v, k_stride, v_stride,
                                            out, out_stride, lse, lse_stride, threads);
}
