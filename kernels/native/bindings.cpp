// The operators of torch.ops.tethys_native, through torch's stable ABI: one library serves every later torch.
// Outputs are allocated by the caller (kernels/native/__init__.py) and written here, so that nothing but pointers crosses.
#include <cstring>
#include <optional>
#include <string>
#include <vector>

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
                              const Maybe& write, int64_t chunk, bool before, bool half) {
  LinearCall c{};
  check(v, "v", 4);
  check(k, "k", 4);
  c.B = v.size(0), c.H = v.size(1), c.T = v.size(2), c.dv = v.size(3), c.dk = k.size(3);
  c.chunk = chunk, c.read_before = before, c.half = half;
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
                           Tensor W_out, Tensor S_out, Maybe saved, int64_t chunk, bool before, bool half) {
  LinearCall c = linear_call(q, k, v, theta, eta, alpha, write, chunk, before, half);
  c.y = rows(y, "y", c.B, c.H, c.T, c.dv);
  c.W = block(W, "W", c.B, c.H, c.dv, c.dk), c.S = block(S, "S", c.B, c.H, c.dv, c.dk);
  c.W_out = block(W_out, "W_out", c.B, c.H, c.dv, c.dk), c.S_out = block(S_out, "S_out", c.B, c.H, c.dv, c.dk);
  if (saved) c.saved = room(*saved, "saved", c.B * c.H * g_core->linear_saved(c));
  auto run = c.T == 1 && !saved ? g_core->linear_step : g_core->linear_forward;
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { run(c, a, b); });
}

static void linear_backward(Tensor q, Tensor k, Tensor v, Tensor theta, Maybe eta, Maybe alpha, Maybe write, Tensor saved, Tensor dy,
                            Tensor dW_out, Tensor dS_out, Tensor dq, Tensor dk, Tensor dv, Tensor dtheta, Maybe deta, Maybe dalpha, Tensor dW,
                            Tensor dS, int64_t chunk, bool before, bool half) {
  LinearCall c = linear_call(q, k, v, theta, eta, alpha, write, chunk, before, half);
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

static const float* heads_of(const Maybe& t, const char* name, int64_t H, int64_t a, int64_t b) {
  if (!t) return nullptr;
  check(*t, name, b ? 3 : 2);
  STD_TORCH_CHECK(t->is_contiguous() && t->size(0) == H && t->size(1) == a && (!b || t->size(2) == b), "tethys_native: ", name,
                  " has the wrong shape or is not contiguous");
  return (const float*)t->data_ptr();
}

// state: W1, W2, S1, S2, A1, A2, each contiguous (B, H, out, in).
static DeepCall deep_call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& theta, const Maybe& eta, const Maybe& alpha,
                          const Maybe& write, const Tensor& phase, const Maybe& init1, const Maybe& init2, const Maybe& scale,
                          const Maybe& shift, int64_t h, int64_t chunk, int64_t read, bool norm, bool residual, double eps, bool half) {
  DeepCall c{};
  check(v, "v", 4);
  check(k, "k", 4);
  c.B = v.size(0), c.H = v.size(1), c.T = v.size(2), c.dout = v.size(3), c.din = k.size(3), c.h = h;
  c.chunk = chunk, c.read = (int)read, c.norm = norm, c.residual = residual, c.eps = (float)eps, c.half = half;
  STD_TORCH_CHECK(chunk > 0 && c.T > 0, "tethys_native: chunk and T must be positive");
  STD_TORCH_CHECK(!residual || c.din == c.dout, "tethys_native: a residual memory needs d_in == d_out");
  c.q = rows(q, "q", c.B, c.H, c.T, c.din), c.k = rows(k, "k", c.B, c.H, c.T, c.din), c.v = rows(v, "v", c.B, c.H, c.T, c.dout);
  c.theta = gate(theta, "theta", c.B, c.H, c.T, 2), c.eta = gate(eta, "eta", c.B, c.H, c.T, 2);
  c.alpha = gate(alpha, "alpha", c.B, c.H, c.T, 2);
  c.shared = c.theta.l == 0 && (!eta || c.eta.l == 0) && (!alpha || c.alpha.l == 0);
  c.write = mask(write, c.B, c.T);
  check(phase, "phase", 1, torch::headeronly::ScalarType::Long);
  STD_TORCH_CHECK(phase.size(0) == c.B && phase.is_contiguous(), "tethys_native: phase must be (B,)");
  c.phase = (const int64_t*)phase.data_ptr();
  for (int64_t b = 0; b < c.B; ++b)
    STD_TORCH_CHECK(c.phase[b] >= 0 && c.phase[b] < chunk, "phase must lie in [0, chunk): found ", c.phase[b], " with chunk ", chunk,
                    "; was the state made with another chunk?");
  c.init[0] = heads_of(init1, "init[0]", c.H, h, c.din), c.init[1] = heads_of(init2, "init[1]", c.H, c.dout, h);
  STD_TORCH_CHECK(!c.init[0] == !c.init[1], "tethys_native: init needs both layers");
  c.scale = heads_of(scale, "affine[0]", c.H, c.dout, 0), c.shift = heads_of(shift, "affine[1]", c.H, c.dout, 0);
  STD_TORCH_CHECK(!c.scale == !c.shift, "tethys_native: affine needs scale and shift");
  return c;
}

static void deep_blocks(float** to, const std::vector<Tensor>& state, int64_t first, const char* name, const DeepCall& c) {
  to[0] = block(state[first], name, c.B, c.H, c.h, c.din), to[1] = block(state[first + 1], name, c.B, c.H, c.dout, c.h);
}

// Blocks of the stream that has most: what `saved` must hold room for.
static int64_t deep_count(Tensor phase, Maybe write, int64_t T, int64_t chunk) {
  DeepCall c{};
  c.B = phase.size(0), c.T = T, c.chunk = chunk;
  c.phase = (const int64_t*)phase.data_ptr();
  c.write = mask(write, c.B, T);
  return g_core->deep_count(c);
}

static int64_t deep_saved(int64_t din, int64_t dout, int64_t h) {
  DeepCall c{};
  c.din = din, c.dout = dout, c.h = h;
  return (int64_t)g_core->deep_saved(c);
}

static void deep_forward(Tensor q, Tensor k, Tensor v, Tensor theta, Maybe eta, Maybe alpha, Maybe write, Tensor phase, Maybe init1,
                         Maybe init2, Maybe scale, Maybe shift, std::vector<Tensor> state, Tensor y, std::vector<Tensor> out, Maybe saved,
                         int64_t blocks, int64_t chunk, int64_t read, bool norm, bool residual, double eps, bool half) {
  STD_TORCH_CHECK(state.size() == 6 && out.size() == 6, "tethys_native: state is W1, W2, S1, S2, A1, A2");
  DeepCall c = deep_call(q, k, v, theta, eta, alpha, write, phase, init1, init2, scale, shift, state[0].size(2), chunk, read, norm, residual, eps, half);
  c.y = rows(y, "y", c.B, c.H, c.T, c.dout);
  deep_blocks((float**)c.W, state, 0, "W", c), deep_blocks((float**)c.S, state, 2, "S", c), deep_blocks((float**)c.A, state, 4, "anchor", c);
  deep_blocks(c.W_out, out, 0, "W", c), deep_blocks(c.S_out, out, 2, "S", c), deep_blocks(c.A_out, out, 4, "anchor", c);
  c.blocks = blocks;
  if (saved) c.saved = room(*saved, "saved", c.B * c.H * blocks * g_core->deep_saved(c));
  auto run = c.T == 1 && !saved ? g_core->deep_step : g_core->deep_forward;
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { run(c, a, b); });
}

// dstate: gradients of the six outputs; grads: dq, dk, dv, dtheta, [deta], [dalpha] then six of the state, then [dinit1, dinit2] (a stream
// each), then [dscale, dshift] (a stream each).
static void deep_backward(Tensor q, Tensor k, Tensor v, Tensor theta, Maybe eta, Maybe alpha, Maybe write, Tensor phase, Maybe init1,
                          Maybe init2, Maybe scale, Maybe shift, std::vector<Tensor> anchor, Tensor saved, int64_t blocks, Tensor dy,
                          std::vector<Tensor> dstate, Tensor dq, Tensor dk, Tensor dv, Tensor dtheta, Maybe deta, Maybe dalpha,
                          std::vector<Tensor> grads, int64_t chunk, int64_t read, bool norm, bool residual, double eps, bool half) {
  STD_TORCH_CHECK(anchor.size() == 2 && dstate.size() == 6 && grads.size() == (size_t)(6 + (init1 ? 2 : 0) + (scale ? 2 : 0)),
                  "tethys_native: wrong number of states or gradients");
  DeepCall c = deep_call(q, k, v, theta, eta, alpha, write, phase, init1, init2, scale, shift, anchor[0].size(2), chunk, read, norm, residual, eps, half);
  deep_blocks((float**)c.A, anchor, 0, "anchor", c);
  c.blocks = blocks;
  c.saved = room(saved, "saved", c.B * c.H * blocks * g_core->deep_saved(c));
  c.dy = rows(dy, "dy", c.B, c.H, c.T, c.dout), c.dq = rows(dq, "dq", c.B, c.H, c.T, c.din);
  c.dkey = rows(dk, "dk", c.B, c.H, c.T, c.din), c.dval = rows(dv, "dv", c.B, c.H, c.T, c.dout);
  STD_TORCH_CHECK(eta.has_value() == deta.has_value() && alpha.has_value() == dalpha.has_value(), "tethys_native: a gate lacks its gradient");
  c.dtheta = gate(dtheta, "dtheta", c.B, c.H, c.T, 2), c.deta = gate(deta, "deta", c.B, c.H, c.T, 2);
  c.dalpha = gate(dalpha, "dalpha", c.B, c.H, c.T, 2);
  deep_blocks((float**)c.dW_out, dstate, 0, "dW", c), deep_blocks((float**)c.dS_out, dstate, 2, "dS", c);
  deep_blocks((float**)c.dA_out, dstate, 4, "danchor", c);
  deep_blocks(c.dW, grads, 0, "dW", c), deep_blocks(c.dS, grads, 2, "dS", c), deep_blocks(c.dA, grads, 4, "danchor", c);
  size_t at = 6;
  if (init1) deep_blocks(c.dinit, grads, at, "dinit", c), at += 2;
  if (scale) {
    check(grads[at], "dscale", 3);
    check(grads[at + 1], "dshift", 3);
    STD_TORCH_CHECK(grads[at].numel() == c.B * c.H * c.dout && grads[at].is_contiguous() && grads[at + 1].numel() == c.B * c.H * c.dout &&
                        grads[at + 1].is_contiguous(), "tethys_native: dscale and dshift must be contiguous (B, H, dout)");
    c.dscale = (float*)grads[at].data_ptr(), c.dshift = (float*)grads[at + 1].data_ptr();
  }
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { g_core->deep_backward(c, a, b); });
}

static const float* dense(const Tensor& t, const char* name, int64_t floats) {
  check(t, name, t.dim());
  STD_TORCH_CHECK(t.is_contiguous() && t.numel() == floats, "tethys_native: ", name, " must be contiguous and hold ", floats, " numbers");
  return (const float*)t.data_ptr();
}

// (B,) numbers in [0, limit); `hint` ends the message.
static int64_t* counters(const Tensor& t, const char* name, int64_t B, int64_t limit, const char* hint) {
  check(t, name, 1, torch::headeronly::ScalarType::Long);
  STD_TORCH_CHECK(t.size(0) == B && t.is_contiguous(), "tethys_native: ", name, " must be (B,)");
  int64_t* at = (int64_t*)t.data_ptr();
  for (int64_t b = 0; b < B; ++b)
    STD_TORCH_CHECK(at[b] >= 0 && at[b] < limit, name, " must lie in [0, chunk): found ", at[b], " with chunk ", limit, hint);
  return at;
}

static HeadsCall heads_call(const Tensor& u, const Tensor& tail, const Tensor& weight, int64_t heads, double scale) {
  HeadsCall c{};
  check(u, "u", 3);
  check(weight, "weight", 2);
  int64_t D3 = u.size(2);
  c.B = u.size(0), c.T = u.size(1), c.H = heads, c.d = D3 / (3 * heads), c.taps = weight.size(0), c.scale = (float)scale;
  STD_TORCH_CHECK(D3 == 3 * c.H * c.d && u.stride(2) == 1, "tethys_native: u must be (B, T, 3 D) with D a multiple of the heads");
  STD_TORCH_CHECK(c.taps >= 1 && c.taps <= 8, "tethys_native: the convolution has 1 to 8 taps, not ", c.taps);
  c.u = (const float*)u.data_ptr(), c.u_b = u.stride(0), c.u_t = u.stride(1);
  c.tail = dense(tail, "tail", c.B * (c.taps - 1) * D3), c.weight = dense(weight, "weight", c.taps * D3);
  return c;
}

static void heads_forward(Tensor u, Tensor tail, Tensor weight, Tensor out, int64_t heads, double scale) {
  HeadsCall c = heads_call(u, tail, weight, heads, scale);
  c.out = (float*)dense(out, "out", c.B * c.T * u.size(2));
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { g_core->heads_forward(c, a, b); });
}

static void heads_backward(Tensor u, Tensor tail, Tensor weight, Tensor dq, Tensor dk, Tensor dv, Tensor du, Tensor dtail, Tensor dweight,
                           int64_t heads, double scale) {
  HeadsCall c = heads_call(u, tail, weight, heads, scale);
  c.dq = rows(dq, "dq", c.B, c.H, c.T, c.d), c.dk = rows(dk, "dk", c.B, c.H, c.T, c.d), c.dv = rows(dv, "dv", c.B, c.H, c.T, c.d);
  c.du = (float*)dense(du, "du", c.B * c.T * u.size(2)), c.dtail = (float*)dense(dtail, "dtail", tail.numel());
  c.dweight = (float*)dense(dweight, "dweight", c.B * weight.numel());
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { g_core->heads_backward(c, a, b); });
}

static GateCall gate_call(const Tensor& y, const Tensor& g, const Tensor& weight) {
  GateCall c{};
  check(y, "y", 4);
  check(g, "g", 3);
  c.B = y.size(0), c.H = y.size(1), c.T = y.size(2), c.d = y.size(3);
  c.y = rows(y, "y", c.B, c.H, c.T, c.d);
  STD_TORCH_CHECK(g.size(0) == c.B && g.size(1) == c.T && g.size(2) == c.H * c.d && g.stride(2) == 1, "tethys_native: g must be (B, T, D)");
  c.g = (const float*)g.data_ptr(), c.g_b = g.stride(0), c.g_t = g.stride(1);
  c.weight = dense(weight, "weight", c.d);
  return c;
}

static void gate_forward(Tensor y, Tensor g, Tensor weight, Tensor out) {
  GateCall c = gate_call(y, g, weight);
  c.out = (float*)dense(out, "out", g.numel());
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { g_core->gate_forward(c, a, b); });
}

static void gate_backward(Tensor y, Tensor g, Tensor weight, Tensor dout, Tensor dy, Tensor dg, Tensor dweight) {
  GateCall c = gate_call(y, g, weight);
  c.dout = dense(dout, "dout", g.numel()), c.dy = rows(dy, "dy", c.B, c.H, c.T, c.d);
  c.dg = (float*)dense(dg, "dg", g.numel()), c.dweight = (float*)dense(dweight, "dweight", c.B * c.H * c.d);
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { g_core->gate_backward(c, a, b); });
}

// What a layer computes, apart from its tensors.
struct Form {
  int64_t heads;
  double length, divisor;
  bool momentum, decay;
  int64_t chunk, read;
  bool lnorm, residual;
  double eps;
};

// Numbers of work that a step of B streams needs: projections of `width` numbers a stream, then heads, reads, gates and the gated output.
static int64_t step_work(int64_t B, int64_t width, int64_t D, int64_t gates) { return B * (width + 5 * D + gates); }

// A call of T tokens on the state W, S or W1, W2, S1, S2, A1, A2 with phase. work: `step_work` numbers, for a call of one token.
static StepCall step_call(int64_t B, int64_t T, int64_t width, float* work, const std::vector<Tensor>& state, const Maybe& phase,
                          const Tensor& tail, const Tensor& conv, const Tensor& bias, const Tensor& norm, const Maybe& init1, const Maybe& init2,
                          const Maybe& scale, const Maybe& shift, const Form& f) {
  StepCall c{};
  c.matrix = state.size() == 2;
  STD_TORCH_CHECK(c.matrix || (state.size() == 6 && phase), "tethys_native: state is W, S or W1, W2, S1, S2, A1, A2 with phase");
  check(state[0], "state", 4);
  c.layers = c.matrix ? 1 : 2, c.momentum = f.momentum, c.decay = f.decay, c.divisor = (float)f.divisor;
  int64_t H = f.heads, d = norm.size(0), D = d * H, L = c.layers;
  float *p = work, *w = p + B * width, *o = w + B * (4 * D + 3 * H * L);
  c.p = p, c.p_b = width;
  c.bias = dense(bias, "bias", 3 * H * L);
  HeadsCall& h = c.heads;
  h.B = B, h.H = H, h.T = T, h.d = d, h.taps = conv.size(0), h.scale = (float)f.length;
  h.u = c.p, h.u_b = c.p_b, h.u_t = 0, h.out = w;
  STD_TORCH_CHECK(h.taps >= 1 && h.taps <= 8, "tethys_native: the convolution has 1 to 8 taps, not ", h.taps);
  h.tail = c.tail = (float*)dense(tail, "tail", B * (h.taps - 1) * 3 * D), h.weight = dense(conv, "conv", h.taps * 3 * D);
  auto part = [&](int64_t n) { return Rows{w + n * D, 3 * D, d, 0}; };
  float* read_out = w + B * 3 * D;
  c.gates = read_out + B * D;
  auto gate_of = [&](int64_t n) { return Gate{c.gates + n * H * L, 3 * H * L, L, 0, 1}; };
  Gate none{};
  c.gate.B = B, c.gate.H = H, c.gate.T = 1, c.gate.d = d;
  c.gate.y = {read_out, D, d, 0}, c.gate.g = c.p + 3 * D, c.gate.g_b = c.p_b, c.gate.weight = dense(norm, "norm", d);
  c.gate.out = o;
  auto fill = [&](auto& call) {
    call.B = B, call.H = H, call.T = T, call.chunk = f.chunk;
    call.q = part(0), call.k = part(1), call.v = part(2), call.y = c.gate.y;
    call.theta = gate_of(2), call.eta = f.momentum ? gate_of(1) : none, call.alpha = f.decay ? gate_of(0) : none;
  };
  if (c.matrix) {
    fill(c.linear);
    c.linear.dk = c.linear.dv = d, c.linear.read_before = f.read == 1;
    c.init = heads_of(init1, "init", H, d, d);
    c.linear.W = c.linear.W_out = block(state[0], "W", B, H, d, d), c.linear.S = c.linear.S_out = block(state[1], "S", B, H, d, d);
  } else {
    fill(c.deep);
    DeepCall& e = c.deep;
    e.din = e.dout = d, e.h = state[0].size(2), e.read = (int)f.read, e.norm = f.lnorm, e.residual = f.residual, e.eps = (float)f.eps;
    e.phase = counters(*phase, "phase", B, f.chunk, "; was the state made with another chunk?");
    e.init[0] = heads_of(init1, "init[0]", H, e.h, d), e.init[1] = heads_of(init2, "init[1]", H, d, e.h);
    e.scale = heads_of(scale, "affine[0]", H, d, 0), e.shift = heads_of(shift, "affine[1]", H, d, 0);
    deep_blocks((float**)e.W, state, 0, "W", e), deep_blocks((float**)e.S, state, 2, "S", e), deep_blocks((float**)e.A, state, 4, "anchor", e);
    for (int l = 0; l < 2; ++l) e.W_out[l] = (float*)e.W[l], e.S_out[l] = (float*)e.S[l], e.A_out[l] = (float*)e.A[l];
  }
  return c;
}

static void advance(const Maybe& phase, int64_t tokens, int64_t chunk) {
  if (!phase) return;
  int64_t* at = (int64_t*)phase->data_ptr();
  for (int64_t b = 0; b < phase->size(0); ++b) at[b] = (at[b] + tokens) % chunk;
}

static float* arena(size_t floats) { // work of one call, kept by the thread
  static thread_local std::vector<float> held;
  if (held.size() < floats) held.resize(floats);
  return held.data();
}

// x (B, T, D) -> y (B, T, D). project (D, 4 D + 3 H L) = [W_qkv | W_gate | W_gates]^T and out (D, D) = W_out^T, each with its rows padded with zeros
// to an odd number of vectors of 16. state: W, S of a matrix memory, or W1, W2, S1, S2, A1, A2 of a deep one, changed in place like tail and phase.
static void layer(Tensor x, Tensor tail, std::vector<Tensor> state, Maybe phase, Tensor y, Tensor project, Tensor conv, Tensor bias,
                  Tensor norm, Tensor output, Maybe init1, Maybe init2, Maybe scale, Maybe shift, int64_t heads, double length, double divisor,
                  bool momentum, bool decay, int64_t chunk, int64_t read, bool lnorm, bool residual, double eps, bool half) {
  check(x, "x", 3);
  int64_t B = x.size(0), T = x.size(1), H = heads, D = norm.size(0) * heads, L = state.size() == 2 ? 1 : 2;
  int64_t width = ((4 * D + 3 * H * L + 15) / 16 | 1) * 16, wide = ((D + 15) / 16 | 1) * 16, work = step_work(B, width, D, 3 * H * L);
  bool one = T == 1;
  float *p = one ? arena(work + B * wide) : nullptr, *result = p + work;
  StepCall c = step_call(B, T, width, p, state, phase, tail, conv, bias, norm, init1, init2, scale, shift,
                         {heads, length, divisor, momentum, decay, chunk, read, lnorm, residual, eps});
  c.half = half, c.width = width, c.wide = wide;
  c.x = dense(x, "x", B * T * D), c.y = (float*)dense(y, "y", B * T * D);
  c.project = dense(project, "project", D * width), c.output = dense(output, "out", D * wide);
  if (one) {
    g_core->product(B, width, D, c.x, D, c.project, width, p, width);
    over_memories(B * H, [&](int64_t a, int64_t b) { g_core->layer_step(c, a, b); });
  } else {
    over_memories(B, [&](int64_t a, int64_t b) { g_core->layer_forward(c, a, b); });
  }
  if (!c.matrix) advance(phase, T, chunk);
  if (!one) return;
  const float* o = c.gate.out;
  if (D % 16 == 0) return g_core->product(B, D, D, o, D, c.output, wide, c.y, D);
  g_core->product(B, wide, D, o, D, c.output, wide, result, wide);
  for (int64_t b = 0; b < B; ++b) memcpy(c.y + b * D, result + b * wide, D * 4);
}

// Tensors of a list, one after the other.
struct List {
  const std::vector<Tensor>& tensors;
  size_t at = 0;
  const Tensor& next() {
    STD_TORCH_CHECK(at < tensors.size(), "tethys_native: block_step: a tensor is missing");
    return tensors[at++];
  }
  float* next(const char* name, int64_t floats) { return (float*)dense(next(), name, floats); }
  std::vector<Tensor> next_of(size_t n) {
    std::vector<Tensor> found;
    for (size_t i = 0; i < n; ++i) found.push_back(next());
    return found;
  }
  void end() { STD_TORCH_CHECK(at == tensors.size(), "tethys_native: block_step: a tensor too many"); }
};

// One token of a block, x (B, D) in place. kind: 0 lmm, 1 window, 2 mag, 3 mal, 4 mac; what a kind lacks is left out of the lists.
// weights: mixer norm, feed-forward norm, gate and up (2 hidden, D), down (D, hidden); of attention: qkv (3 D, D), out (D, D), frequency (d / 2),
//     persistent keys and values (1, H, P, d); the norms of attention and memory (mag, mac) or between them (mal); of the memory: qkv, gate,
//     gates, bias, conv, norm, out, and what it decays towards (0 to 2).
// state: keys, values (B, H, N, d); of mac: those of what was retrieved, and the retrieval's tail (B, taps - 1, D); the memory's tail and
//     tensors; of mac: those of the memory that is read. counts: tokens or places (B,) of attention; the phases of a deep memory, and of what is read.
static void block_step(Tensor x, int64_t kind, std::vector<Tensor> weights, std::vector<Tensor> state, std::vector<Tensor> counts,
                       int64_t heads, double length, double divisor, bool momentum, bool decay, int64_t chunk, int64_t read, bool lnorm,
                       bool residual, double eps) {
  check(x, "x", 2);
  List w{weights}, held{state}, numbers{counts};
  BlockCall c{};
  int64_t B = x.size(0), D = x.size(1), H = heads, d = D / heads;
  c.kind = (int)kind, c.D = D, c.x = (float*)dense(x, "x", B * D);
  c.mixer_norm = w.next("mixer_norm", D), c.feed_norm = w.next("feed_forward_norm", D);
  c.hidden = weights.at(2).numel() / (2 * D);
  c.gate_up = w.next("gate_up", 2 * c.hidden * D), c.down = w.next("down", D * c.hidden);
  bool attends = kind != BlockCall::kLmm, remembers = kind != BlockCall::kWindow, mac = kind == BlockCall::kMac;
  AttendCall& a = c.attend;
  int64_t* count = nullptr;
  if (attends) {
    c.qkv = w.next("qkv", 3 * D * D), c.out = w.next("out", D * D);
    a.H = H, a.d = d, a.slides = !mac, a.frequency = w.next("frequency", d / 2);
    a.P = w.tensors.at(w.at).size(2), a.prefix_k = w.next("prefix keys", D * a.P), a.prefix_v = w.next("prefix values", D * a.P);
    a.N = state.at(0).size(2), a.keys = held.next("keys", B * D * a.N), a.values = held.next("values", B * D * a.N);
    const Tensor& counted = numbers.next();
    a.count = count = counters(counted, "count", B, mac ? a.N : INT64_MAX, "");
    if (kind >= BlockCall::kMag) c.norms[0] = w.next("norm", D);
    if (kind == BlockCall::kMag || mac) c.norms[1] = w.next("memory norm", D);
  }
  Maybe phase, anchor_phase;
  std::vector<Tensor> memory, anchor;
  if (remembers) {
    int64_t layers = w.tensors.at(w.at + 2).size(0) / (3 * H), size = layers == 1 ? 2 : 6; // of its gates: 3 a head and layer
    int64_t gates = 3 * H * layers, width = (4 * D + gates + 15) / 16 * 16;
    c.memory_qkv = w.next("memory qkv", 3 * D * D), c.memory_gate = w.next("memory gate", D * D), c.memory_gates = w.next("memory gates", gates * D);
    const Tensor &bias = w.next(), &conv = w.next(), &norm = w.next();
    c.memory_out = w.next("memory out", D * D);
    Maybe init1, init2;
    if (w.at < weights.size()) init1 = w.next();
    if (w.at < weights.size()) init2 = w.next();
    if (mac) {
      a.context_k = held.next("context keys", B * D * a.N), a.context_v = held.next("context values", B * D * a.N);
      c.reading = held.next("reading", B * (conv.size(0) - 1) * D);
    }
    const Tensor& tail = held.next();
    memory = held.next_of(size);
    if (layers > 1) phase = numbers.next();
    STD_TORCH_CHECK(norm.numel() == d, "tethys_native: block_step: the memory has other heads than its block");
    c.memory = step_call(B, 1, width, arena(step_work(B, width, D, gates)), memory, phase, tail, conv, bias, norm, init1, init2, {}, {},
                         {heads, length, divisor, momentum, decay, chunk, read, lnorm, residual, eps});
    if (mac) {
      anchor = held.next_of(size);
      for (size_t i = 0; i < anchor.size(); ++i) dense(anchor[i], "the memory that is read", memory[i].numel());
      c.anchor[0] = (float*)anchor[0].data_ptr(), c.anchor[1] = (float*)anchor[1].data_ptr();
      if (layers > 1) anchor_phase = numbers.next(), counters(*anchor_phase, "phase", B, chunk, "");
    }
  }
  w.end(), held.end(), numbers.end();
  over_memories(B, [&](int64_t from, int64_t to) { g_core->block_step(c, from, to); });
  advance(phase, 1, chunk);
  for (int64_t b = 0; count && b < B; ++b) {
    count[b] += 1;
    if (!mac || count[b] < a.N) continue;
    count[b] = 0; // the segment is full: the next one reads the memory as it is now
    for (size_t i = 0; i < anchor.size(); ++i) {
      size_t floats = memory[i].numel() / B;
      memcpy((float*)anchor[i].data_ptr() + b * floats, (float*)memory[i].data_ptr() + b * floats, floats * 4);
    }
    if (phase) ((int64_t*)anchor_phase->data_ptr())[b] = ((int64_t*)phase->data_ptr())[b];
  }
}

// x (B, D) -> y (B, N) = rms(x) weight W^T.
static void norm_times(Tensor x, Tensor norm, Tensor weight, Tensor y) {
  check(x, "x", 2);
  int64_t B = x.size(0), D = x.size(1), N = weight.size(0);
  const float *from = dense(x, "x", B * D), *n = dense(norm, "norm", D), *w = dense(weight, "weight", N * D);
  float* to = (float*)dense(y, "y", B * N);
  over_memories(B, [&](int64_t a, int64_t b) { g_core->norm_times(b - a, N, D, from + a * D, n, w, to + a * N); });
}

// c (=, +=, -=: mode 0, 1, 2) op(a) op(b): matrices with rows of unit stride; ta, tb: the operand is given transposed.
static void matmul(Tensor a, bool ta, Tensor b, bool tb, Tensor c, int64_t mode, bool half) {
  for (const Tensor* t : {&a, &b, &c}) {
    check(*t, "a factor or the product", 2);
    STD_TORCH_CHECK(t->stride(1) == 1 || t->size(1) == 1, "tethys_native: the rows of a product's matrices must have unit stride");
  }
  int64_t M = c.size(0), N = c.size(1), K = a.size(ta ? 0 : 1);
  STD_TORCH_CHECK(a.size(ta ? 1 : 0) == M && b.size(tb ? 1 : 0) == K && b.size(tb ? 0 : 1) == N, "tethys_native: factors do not fit");
  constexpr int64_t step = 256; // rows a unit of work: their share of a stays in the second cache
  auto run = [&](int64_t from, int64_t to) {
    for (int64_t m = from; m < to; ++m)
      g_core->matmul(m * step, M - m * step < step ? M - m * step : step, N, K, (const float*)a.data_ptr(), a.stride(0), ta,
                     (const float*)b.data_ptr(), b.stride(0), tb, (float*)c.data_ptr(), c.stride(0), (int)mode, half);
  };
  over_memories((M + step - 1) / step, run);
}

constexpr int64_t kRows = 64; // a unit of work of the elementwise parts

template <class F>
static void over_rows(int64_t rows, F f) { // f(begin, end, unit)
  over_memories((rows + kRows - 1) / kRows, [&](int64_t from, int64_t to) {
    for (int64_t u = from; u < to; ++u) f(u * kRows, (u + 1) * kRows < rows ? (u + 1) * kRows : rows, u);
  });
}

static void swiglu_forward(Tensor h, Tensor out) {
  int64_t n = out.size(-1), rows = out.numel() / n;
  const float* from = dense(h, "h", 2 * rows * n);
  float* to = (float*)dense(out, "out", rows * n);
  over_rows(rows, [&](int64_t a, int64_t b, int64_t) { g_core->swiglu_forward(from, to, n, a, b); });
}

static void swiglu_backward(Tensor h, Tensor dout, Tensor dh) {
  int64_t n = dout.size(-1), rows = dout.numel() / n;
  const float *from = dense(h, "h", 2 * rows * n), *up = dense(dout, "dout", rows * n);
  float* to = (float*)dense(dh, "dh", 2 * rows * n);
  over_rows(rows, [&](int64_t a, int64_t b, int64_t) { g_core->swiglu_backward(from, up, to, n, a, b); });
}

static int64_t norm_units(int64_t rows) { return (rows + kRows - 1) / kRows; }

static void norm_forward(Tensor x, Tensor weight, Tensor out, Tensor scale, double floor) {
  int64_t D = weight.numel(), rows = scale.numel();
  const float *from = dense(x, "x", rows * D), *w = dense(weight, "weight", D);
  float *to = (float*)dense(out, "out", rows * D), *s = (float*)dense(scale, "scale", rows);
  over_rows(rows, [&](int64_t a, int64_t b, int64_t) { g_core->norm_forward(from, w, to, s, D, (float)floor, a, b); });
}

// dweight (units, D): one row a unit of work, for the caller to sum.
static void norm_backward(Tensor x, Tensor weight, Tensor scale, Tensor dout, Tensor dx, Tensor dweight) {
  int64_t D = weight.numel(), rows = scale.numel();
  const float *from = dense(x, "x", rows * D), *w = dense(weight, "weight", D), *s = dense(scale, "scale", rows);
  const float* up = dense(dout, "dout", rows * D);
  float *to = (float*)dense(dx, "dx", rows * D), *dw = (float*)dense(dweight, "dweight", norm_units(rows) * D);
  over_rows(rows, [&](int64_t a, int64_t b, int64_t u) { g_core->norm_backward(from, w, s, up, to, dw + u * D, D, a, b); });
}

static void rope(Tensor x, Tensor cosine, Tensor sine, Tensor out, bool back) {
  check(x, "x", 4);
  RopeCall c{};
  c.B = x.size(0), c.H = x.size(1), c.T = x.size(2), c.d = x.size(3), c.sign = back ? -1.0f : 1.0f;
  int64_t angles = cosine.size(0);
  STD_TORCH_CHECK(c.d % 2 == 0 && (angles == 1 || angles == c.B), "tethys_native: rope needs an even width, and angles for one stream or all");
  c.b = angles == 1 ? 0 : c.T;
  c.x = rows(x, "x", c.B, c.H, c.T, c.d), c.out = rows(out, "out", c.B, c.H, c.T, c.d);
  c.cosine = dense(cosine, "cosine", angles * c.T * c.d / 2), c.sine = dense(sine, "sine", angles * c.T * c.d / 2);
  over_memories(c.B * c.H, [&](int64_t a, int64_t b) { g_core->rope(c, a, b); });
}

static bool has_half() { return g_core->has_half(); }

STABLE_TORCH_LIBRARY(tethys_native, m) {
  m.def("sources() -> str");
  m.def("select_width(int width) -> int");
  m.def("fma_flops(int repeats) -> float");
  m.def("has_half() -> bool");
  m.def("matmul(Tensor a, bool ta, Tensor b, bool tb, Tensor(a!) c, int mode, bool half) -> ()");
  m.def("linear_saved(int T, int dk, int dv, int chunk) -> int");
  m.def(
      "linear_forward(Tensor q, Tensor k, Tensor v, Tensor theta, Tensor? eta, Tensor? alpha, Tensor? write, Tensor W, Tensor S, "
      "Tensor(a!) y, Tensor(b!) W_out, Tensor(c!) S_out, Tensor(d!)? saved, int chunk, bool before, bool half) -> ()");
  m.def(
      "linear_backward(Tensor q, Tensor k, Tensor v, Tensor theta, Tensor? eta, Tensor? alpha, Tensor? write, Tensor saved, Tensor dy, "
      "Tensor dW_out, Tensor dS_out, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dtheta, Tensor(e!)? deta, Tensor(f!)? dalpha, "
      "Tensor(g!) dW, Tensor(h!) dS, int chunk, bool before, bool half) -> ()");
  m.def("heads_forward(Tensor u, Tensor tail, Tensor weight, Tensor(a!) out, int heads, float scale) -> ()");
  m.def(
      "heads_backward(Tensor u, Tensor tail, Tensor weight, Tensor dq, Tensor dk, Tensor dv, Tensor(a!) du, Tensor(b!) dtail, "
      "Tensor(c!) dweight, int heads, float scale) -> ()");
  m.def("gate_forward(Tensor y, Tensor g, Tensor weight, Tensor(a!) out) -> ()");
  m.def("gate_backward(Tensor y, Tensor g, Tensor weight, Tensor dout, Tensor(a!) dy, Tensor(b!) dg, Tensor(c!) dweight) -> ()");
  m.def(
      "layer(Tensor x, Tensor(a!) tail, Tensor(b!)[] state, Tensor(c!)? phase, Tensor(d!) y, Tensor project, Tensor conv, Tensor bias, "
      "Tensor norm, Tensor out, Tensor? init1, Tensor? init2, Tensor? scale, Tensor? shift, int heads, float length, float divisor, "
      "bool momentum, bool decay, int chunk, int read, bool lnorm, bool residual, float eps, bool half) -> ()");
  m.def(
      "block_step(Tensor(a!) x, int kind, Tensor[] weights, Tensor(b!)[] state, Tensor(c!)[] counts, int heads, float length, "
      "float divisor, bool momentum, bool decay, int chunk, int read, bool lnorm, bool residual, float eps) -> ()");
  m.def("norm_times(Tensor x, Tensor norm, Tensor weight, Tensor(a!) y) -> ()");
  m.def("swiglu_forward(Tensor h, Tensor(a!) out) -> ()");
  m.def("swiglu_backward(Tensor h, Tensor dout, Tensor(a!) dh) -> ()");
  m.def("norm_units(int rows) -> int");
  m.def("norm_forward(Tensor x, Tensor weight, Tensor(a!) out, Tensor(b!) scale, float floor) -> ()");
  m.def("norm_backward(Tensor x, Tensor weight, Tensor scale, Tensor dout, Tensor(a!) dx, Tensor(b!) dweight) -> ()");
  m.def("rope(Tensor x, Tensor cosine, Tensor sine, Tensor(a!) out, bool back) -> ()");
  m.def("deep_count(Tensor phase, Tensor? write, int T, int chunk) -> int");
  m.def("deep_saved(int din, int dout, int h) -> int");
  m.def(
      "deep_forward(Tensor q, Tensor k, Tensor v, Tensor theta, Tensor? eta, Tensor? alpha, Tensor? write, Tensor phase, Tensor? init1, "
      "Tensor? init2, Tensor? scale, Tensor? shift, Tensor[] state, Tensor(a!) y, Tensor(b!)[] out, Tensor(c!)? saved, int blocks, "
      "int chunk, int read, bool norm, bool residual, float eps, bool half) -> ()");
  m.def(
      "deep_backward(Tensor q, Tensor k, Tensor v, Tensor theta, Tensor? eta, Tensor? alpha, Tensor? write, Tensor phase, Tensor? init1, "
      "Tensor? init2, Tensor? scale, Tensor? shift, Tensor[] anchor, Tensor saved, int blocks, Tensor dy, Tensor[] dstate, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dtheta, Tensor(e!)? deta, Tensor(f!)? dalpha, Tensor(g!)[] grads, int chunk, int read, "
      "bool norm, bool residual, float eps, bool half) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tethys_native, CompositeExplicitAutograd, m) {
  m.impl("sources", TORCH_BOX(&sources));
  m.impl("select_width", TORCH_BOX(&select_width));
  m.impl("fma_flops", TORCH_BOX(&fma_flops));
  m.impl("has_half", TORCH_BOX(&has_half));
  m.impl("norm_units", TORCH_BOX(&norm_units));
  m.impl("linear_saved", TORCH_BOX(&linear_saved));
  m.impl("deep_saved", TORCH_BOX(&deep_saved));
}

STABLE_TORCH_LIBRARY_IMPL(tethys_native, CPU, m) {
  m.impl("linear_forward", TORCH_BOX(&linear_forward));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
  m.impl("heads_forward", TORCH_BOX(&heads_forward));
  m.impl("heads_backward", TORCH_BOX(&heads_backward));
  m.impl("gate_forward", TORCH_BOX(&gate_forward));
  m.impl("gate_backward", TORCH_BOX(&gate_backward));
  m.impl("layer", TORCH_BOX(&layer));
  m.impl("swiglu_forward", TORCH_BOX(&swiglu_forward));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
  m.impl("norm_forward", TORCH_BOX(&norm_forward));
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("block_step", TORCH_BOX(&block_step));
  m.impl("norm_times", TORCH_BOX(&norm_times));
  m.impl("matmul", TORCH_BOX(&matmul));
  m.impl("deep_count", TORCH_BOX(&deep_count));
  m.impl("deep_forward", TORCH_BOX(&deep_forward));
  m.impl("deep_backward", TORCH_BOX(&deep_backward));
}
