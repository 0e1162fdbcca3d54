// What ops call of attention inside their regions, in each ISA's namespace: see attention.inl,
// which is compiled once for each ISA, in paged_attention.cc.
namespace regatta::cpu::REGATTA_ISA {

// A partial result of one row, or several folded: the largest score (in units of ln 2), the sum of
// 2^(score - largest), and besides it V weighted so.
struct RowState {
  float largest, sum;
};

// Everything that the attention of one call needs, shared by its threads.
struct AttentionJob {
  AttentionBatch batch;
  AttentionBatch whole;  // the call's; `batch` may be a piece of it
  PagedCache cache;
  AttentionPlan plan;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t value_dim;     // at most head_dim; rows of V lie as far apart as K's
  int64_t tail_dim = 0;  // with Rows::kTail: the last values of a row of K, which cache.tail has
  float softmax_scale;
  int64_t window;
  float softcap = 0.0f;           // see PagedAttentionParams
  const float* slopes = nullptr;  // [Hq] or null
  const float* sinks = nullptr;   // [Hq] or null
  bool by_tiles = false;          // products of bfloat16
  RowState* partial_states;       // [Hkv][plan.num_partial_rows]
  float* partials;                // [Hkv][plan.num_partial_rows][padded_dim]

  int64_t group() const { return num_heads / num_kv_heads; }
  // Of values.
  int64_t padded_dim() const { return (value_dim + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes; }
};

// Takes the memory that threads share from `scratch`; the batch, all of `whole` or a piece, has
// been checked. value_dim: 0 for head_dim.
inline AttentionJob make_attention_job(const AttentionBatch& whole, const AttentionBatch& batch,
                                       const PagedCache& cache, int64_t num_heads,
                                       int64_t num_kv_heads, int64_t head_dim, float softmax_scale,
                                       int64_t window, Scratch& scratch, int64_t value_dim = 0) {
  AttentionJob job;
  job.batch = batch;
  job.whole = whole;
  job.cache = cache;
  job.num_heads = num_heads;
  job.num_kv_heads = num_kv_heads;
  job.head_dim = head_dim;
  job.value_dim = value_dim ? value_dim : head_dim;
  job.softmax_scale = softmax_scale;
  job.window = window;
  job.by_tiles = has_tiles(running_isa());
  job.plan = make_attention_plan(batch, num_kv_heads, job.group(), window, num_threads(), scratch);
  const int64_t rows = num_kv_heads * job.plan.num_partial_rows;
  job.partial_states = scratch.take<RowState>(rows);
  job.partials = scratch.take<float>(rows * job.padded_dim());
  return job;
}

// Gets the finished row of a token and query head.
using AttendedFn = FunctionRef<void(int64_t token, int64_t head, const float* values)>;

// All rows of the job. T is the activations' dtype; q: [T, Hq * D] of T, or of what they are
// multiplied as. sink(token, head, values) gets value_dim floats per row, once, on some thread.
// Barrier inside only where tiles are divided; none at the end.
template <class T, class Query>
void attend(Team& team, const AttentionJob& job, const Query* q, AttendedFn sink);

// The same over a cache of latents, dense or in fp8.
template <class T>
void attend_latents(Team& team, const AttentionJob& job, const QueryOf<T>* q, AttendedFn sink);

}  // namespace regatta::cpu::REGATTA_ISA
