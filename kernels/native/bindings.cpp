// The operators of torch.ops.tethys_native, through torch's stable ABI: one library serves every later torch.
// Outputs are allocated by the caller (kernels/native/__init__.py) and written here, so that nothing but pointers crosses.
#include <optional>
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "core.h"

using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using namespace tethys;

#if defined(__x86_64__)
extern const Core core16, core8, core4;
static const Core* const kCores[] = {&core16, &core8, &core4};
static bool supported(const Core& c) {
  if (c.width == 16) return __builtin_cpu_supports("x86-64-v4");
  if (c.width == 8) return __builtin_cpu_supports("x86-64-v3");
  return true;
}
#else
extern const Core core4;
static const Core* const kCores[] = {&core4};
static bool supported(const Core&) { return true; }
#endif

static const Core* choose(int64_t width) {
  for (const Core* c : kCores)
    if (supported(*c) && (width == 0 || c->width == width)) return c;
  return nullptr;
}

static const Core* g_core = choose(0);

// Widest vectors the processor has, or the named width; returns the width chosen, 0 if this processor lacks it.
static int64_t select_width(int64_t width) {
  const Core* c = choose(width);
  if (c) g_core = c;
  return c ? c->width : 0;
}

static std::string sources() { return TETHYS_SOURCES; }

static double fma_flops(int64_t repeats) { return g_core->fma(repeats); }

static void check(const Tensor& t, const char* name, int64_t dims, torch::headeronly::ScalarType type = torch::headeronly::ScalarType::Float) {
  STD_TORCH_CHECK(t.scalar_type() == type, "tethys_native: ", name, " has the wrong dtype");
  STD_TORCH_CHECK(t.is_cpu(), "tethys_native: ", name, " is not on the CPU");
  STD_TORCH_CHECK(t.dim() == dims, "tethys_native: ", name, " has ", t.dim(), " dimensions, expected ", dims);
}

static Rows rows(const Tensor& t, const char* name, int64_t B, int64_t H, int64_t T, int64_t d) {
  check(t, name, 4);
  STD_TORCH_CHECK(t.size(0) == B && t.size(1) == H && t.size(2) == T && t.size(3) == d, "tethys_native: ", name, " must be (", B, ", ", H,
                  ", ", T, ", ", d, "), found (", t.size(0), ", ", t.size(1), ", ", t.size(2), ", ", t.size(3), ")");
  STD_TORCH_CHECK(d == 1 || t.stride(3) == 1, "tethys_native: the last dimension of ", name, " must have stride 1");
  return {(float*)t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

static Gate gate(const Maybe& t, const char* name, int64_t B, int64_t H, int64_t T, int64_t L) {
  if (!t) return {};
  check(*t, name, L ? 4 : 3);
  STD_TORCH_CHECK(t->size(0) == B && t->size(1) == H && t->size(2) == T && (!L || t->size(3) == L), "tethys_native: ", name,
                  " must have one number a stream, head and token", L ? " and memory layer" : "");
  return {(float*)t->data_ptr(), t->stride(0), t->stride(1), t->stride(2), L ? t->stride(3) : 0};
}

static float* block(const Tensor& t, const char* name, int64_t a, int64_t b, int64_t c, int64_t d) {
  check(t, name, 4);
  STD_TORCH_CHECK(t.size(0) == a && t.size(1) == b && t.size(2) == c && t.size(3) == d && t.is_contiguous(), "tethys_native: ", name,
                  " must be contiguous and (", a, ", ", b, ", ", c, ", ", d, ")");
  return (float*)t.data_ptr();
}

static Mask mask(const Maybe& t, int64_t B, int64_t T) {
  if (!t) return {};
  check(*t, "write", 2, torch::headeronly::ScalarType::Bool);
  STD_TORCH_CHECK(t->size(0) == B && t->size(1) == T, "tethys_native: write must be (B, T)");
  return {(const uint8_t*)t->data_ptr(), t->stride(0), t->stride(1)};
}

template <class F>
static void over_memories(int64_t n, F f) { // one memory is one unit of work; torch's own thread count holds
  if (torch::stable::get_num_threads() == 1) f(0, n);
  else torch::stable::parallel_for(0, n, 1, f);
}

static float* room(const Tensor& t, const char* name, size_t floats) {
  check(t, name, 1);
  STD_TORCH_CHECK((size_t)t.numel() >= floats, "tethys_native: ", name, " holds ", t.numel(), " numbers, needs ", floats);
  return (float*)t.data_ptr();
}

static LinearCall linear_call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& theta, const Maybe& eta, const Maybe& alpha,
                              const Maybe& write, int64_t chunk, bool before) {
  LinearCall c{};
  check(v, "v", 4);
  check(k, "k", 4);
  c.B = v.size(0), c.H = v.size(1), c.T = v.size(2), c.dv = v.size(3), c.dk = k.size(3);
  c.chunk = chunk, c.read_before = before;
  STD_TORCH_CHECK(chunk > 0, "tethys_native: chunk must be positive");
  c.q = rows(q, "q", c.B, c.H, c.T, c.dk), c.k = rows(k, "k", c.B, c.H, c.T, c.dk), c.v = rows(v, "v", c.B, c.H, c.T, c.dv);
  c.theta = gate(theta, "theta", c.B, c.H, c.T, 0), c.eta = gate(eta, "eta", c.B, c.H, c.T, 0);
  c.alpha = gate(alpha, "alpha", c.B, c.H, c.T, 0);
  c.write = mask(write, c.B, c.T);
  return c;
}

static int64_t linear_saved(int64_t T, int64_t dk, int64_t dv, int64_t chunk) {
  LinearCall c{};
  c.T = T, c.dk = dk, c.dv = dv, c.chunk = chunk;
  return (int64_t)g_core->linear_saved(c);
}

static void linear_forward(Tensor q, Tensor k, Tensor v, Tensor theta, Maybe eta, Maybe alpha, Maybe write, Tensor W, Tensor S, Tensor y,
                           Tensor W_out, Tensor S_out, Maybe saved, int64_t chunk, bool before) {
  LinearCall c = linear_call(q, k, v, theta, eta, alpha, write, chunk, before);
  c.y = rows(y, "y", c.B, c.H, c.T, c.dv);
  c.W = block(W, "W", c.B, c.H, c.dv, c.dk), c.S = block(S, "S", c.B, c.H, c.dv, c.dk);
  c.W_out = block(W_out, "W_out", c.B, c.H, c.dv, c.dk), c.S_out = block(S_out, "S_out", c.B, c.H, c.dv, c.dk);
  if (saved) c.saved = room(*saved, "saved", c.B * c.H * g_core->linear_saved(c));
  auto run = c.T == 1 && !saved ? g_core->linear_step : g_core->linear_forward;
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { run(c, a, b); });
}

static void linear_backward(Tensor q, Tensor k, Tensor v, Tensor theta, Maybe eta, Maybe alpha, Maybe write, Tensor saved, Tensor dy,
                            Tensor dW_out, Tensor dS_out, Tensor dq, Tensor dk, Tensor dv, Tensor dtheta, Maybe deta, Maybe dalpha, Tensor dW,
                            Tensor dS, int64_t chunk, bool before) {
  LinearCall c = linear_call(q, k, v, theta, eta, alpha, write, chunk, before);
  STD_TORCH_CHECK(eta.has_value() == deta.has_value() && alpha.has_value() == dalpha.has_value(), "tethys_native: a gate lacks its gradient");
  c.saved = room(saved, "saved", c.B * c.H * g_core->linear_saved(c));
  c.dy = rows(dy, "dy", c.B, c.H, c.T, c.dv), c.dq = rows(dq, "dq", c.B, c.H, c.T, c.dk);
  c.dkey = rows(dk, "dk", c.B, c.H, c.T, c.dk), c.dval = rows(dv, "dv", c.B, c.H, c.T, c.dv);
  c.dtheta = gate(dtheta, "dtheta", c.B, c.H, c.T, 0), c.deta = gate(deta, "deta", c.B, c.H, c.T, 0);
  c.dalpha = gate(dalpha, "dalpha", c.B, c.H, c.T, 0);
  c.dW_out = block(dW_out, "dW_out", c.B, c.H, c.dv, c.dk), c.dS_out = block(dS_out, "dS_out", c.B, c.H, c.dv, c.dk);
  c.dW = block(dW, "dW", c.B, c.H, c.dv, c.dk), c.dS = block(dS, "dS", c.B, c.H, c.dv, c.dk);
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { g_core->linear_backward(c, a, b); });
}

STABLE_TORCH_LIBRARY(tethys_native, m) {
  m.def("sources() -> str");
  m.def("select_width(int width) -> int");
  m.def("fma_flops(int repeats) -> float");
  m.def("linear_saved(int T, int dk, int dv, int chunk) -> int");
  m.def(
      "linear_forward(Tensor q, Tensor k, Tensor v, Tensor theta, Tensor? eta, Tensor? alpha, Tensor? write, Tensor W, Tensor S, "
      "Tensor(a!) y, Tensor(b!) W_out, Tensor(c!) S_out, Tensor(d!)? saved, int chunk, bool before) -> ()");
  m.def(
      "linear_backward(Tensor q, Tensor k, Tensor v, Tensor theta, Tensor? eta, Tensor? alpha, Tensor? write, Tensor saved, Tensor dy, "
      "Tensor dW_out, Tensor dS_out, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dtheta, Tensor(e!)? deta, Tensor(f!)? dalpha, "
      "Tensor(g!) dW, Tensor(h!) dS, int chunk, bool before) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tethys_native, CompositeExplicitAutograd, m) {
  m.impl("sources", TORCH_BOX(&sources));
  m.impl("select_width", TORCH_BOX(&select_width));
  m.impl("fma_flops", TORCH_BOX(&fma_flops));
  m.impl("linear_saved", TORCH_BOX(&linear_saved));
}

STABLE_TORCH_LIBRARY_IMPL(tethys_native, CPU, m) {
  m.impl("linear_forward", TORCH_BOX(&linear_forward));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}
