// Backward: moves dy and x rows in | gradient of down and SwiGLU | gradient of up | gradients of w2
// and w1 | combine, and the shared expert beside them.
#include "backward.cuh"

namespace mok::sm90 {
namespace {

using T = BackwardTiling;

struct Group {  // of experts: the routed ones, or the shared one
  const void *w1, *w2;
  const void *d_w1, *d_w2;
  const void *x, *dy, *gate_up;
  void *d_gate_up, *activation, *dx;
  int64_t rows;
  int32_t width;
  bool shared;
};

void set_weight_gradient(PassParameters& q, PassShape& shape, const BackwardArguments& x,
                         const Group& g, const void* table, const Matrix& a, const Matrix& b) {
  shape = {};
  if (table == nullptr) return;
  q.a = encode_operand(a, {BLOCK_K, BLOCK_M / 64});
  q.b = encode_operand(b, {BLOCK_K, T::BLOCK_N / 64});
  const Matrix gradient{.data = nullptr,
                        .rows = a.columns,
                        .columns = b.columns,
                        .fp32 = x.gradients.type == Gradient::kFp32};
  set_table(q, table, gradient, operand_box<Role::kGradient, T>(), x.routing, g.shared);
  q.columns = static_cast<int32_t>(b.columns);
  q.output_rows = static_cast<int32_t>(a.columns);
  shape = {.m_tiles = tiles_of(q.output_rows, BLOCK_M),
           .n_tiles = tiles_of(q.columns, T::BLOCK_N),
           .depth = 0};
}

void set_passes(DirectionParameters& p, const BackwardArguments& x, const Group& g) {
  using Gated = SwiGluGradient<T>;
  const int hidden = x.sizes.hidden;
  PassShape* const shape = g.shared ? p.plan.shape.shared : p.plan.shape.routed;
  PassParameters* const pass = p.pass + (g.shared ? 4 : 0);
  const Matrix dy = bf16(g.dy, g.rows, hidden), in = bf16(g.x, g.rows, hidden);
  const Matrix d_gate_up = bf16(g.d_gate_up, g.rows, 2 * g.width);
  const Matrix activation = bf16(g.activation, g.rows, g.width);

  PassParameters& down = pass[0];
  down.a = encode_operand(dy, {BLOCK_M, 1});
  down.b = encode_gate_up(bf16(g.gate_up, g.rows, 2 * g.width), 2 * Gated::kWidth);
  down.out = encode_gate_up(d_gate_up, 2 * Gated::kWidth);
  down.second = encode_boxes(activation, 2 * Gated::kWidth);
  set_table(down,
            g.w2,
            bf16(nullptr, hidden, g.width),
            operand_box<Role::kDownGradient, T>(),
            x.routing,
            g.shared);
  down.columns = g.width;
  down.out_rows = static_cast<__nv_bfloat16*>(g.d_gate_up);
  down.second_rows = static_cast<__nv_bfloat16*>(g.activation);
  down.prob = g.shared ? nullptr : x.routing.prob_R;
  down.parts = g.shared ? nullptr : x.parts;
  shape[0] = {.m_tiles = 0, .n_tiles = tiles_of(g.width, T::BLOCK_N), .depth = hidden / BLOCK_K};

  PassParameters& up = pass[1];
  up.a = encode_operand(d_gate_up, {BLOCK_M, 1});
  up.out = encode_boxes(bf16(g.dx, g.rows, hidden), 128);
  set_table(up,
            g.w1,
            bf16(nullptr, 2 * g.width, hidden),
            operand_box<Role::kInputGradient, T>(),
            x.routing,
            g.shared);
  up.columns = hidden;
  up.out_rows = static_cast<__nv_bfloat16*>(g.dx);
  shape[1] = {
      .m_tiles = 0, .n_tiles = tiles_of(hidden, T::BLOCK_N), .depth = 2 * g.width / BLOCK_K};

  if (!g.shared && x.peers.ranks > 1) {
    PassParameters& again = p.pass[2 * 4];  // of later laps: gate and up, where their gradient goes
    again.a = encode_operand(in, {BLOCK_M, 1});
    again.out = encode_boxes(d_gate_up, 2 * SwiGlu<T>::kWidth);
    set_table(again,
              x.again_w1,
              bf16(nullptr, 2 * g.width, hidden),
              operand_box<Role::kUp, T>(),
              x.routing,
              false);
    again.columns = g.width;
    again.out_rows = static_cast<__nv_bfloat16*>(g.d_gate_up);
    p.plan.shape.again = {
        .m_tiles = 0, .n_tiles = tiles_of(g.width, T::BLOCK_N / 2), .depth = hidden / BLOCK_K};
  }

  set_weight_gradient(pass[2], shape[2], x, g, g.d_w2, dy, activation);
  set_weight_gradient(pass[3], shape[3], x, g, g.d_w1, d_gate_up, in);
}

}  // namespace

void launch_backward(const BackwardArguments& x) {
  const Routing& r = x.routing;
  DirectionParameters p{};
  p.plan.shape = plan_shape(r, 4);
  p.plan.shape.keep_empty = !x.gradients.accumulate;
  p.fault = fault_record();
  set_passes(p,
             x,
             {.w1 = x.weights.w1,
              .w2 = x.weights.w2,
              .d_w1 = x.gradients.w1,
              .d_w2 = x.gradients.w2,
              .x = x.x_rows,
              .dy = x.dy_rows,
              .gate_up = x.gate_up,
              .d_gate_up = x.d_gate_up,
              .activation = x.activation,
              .dx = x.dx_rows,
              .rows = r.rows,
              .width = x.sizes.width,
              .shared = false});
  if (x.sizes.shared_width > 0 && r.tokens > 0) {
    set_passes(p,
               x,
               {.w1 = x.weights.shared_w1,
                .w2 = x.weights.shared_w2,
                .d_w1 = x.gradients.shared_w1,
                .d_w2 = x.gradients.shared_w2,
                .x = x.x,
                .dy = x.dy,
                .gate_up = x.shared_gate_up,
                .d_gate_up = x.shared_d_gate_up,
                .activation = x.shared_activation,
                .dx = x.shared_dx,
                .rows = r.tokens,
                .width = x.sizes.shared_width,
                .shared = true});
  }
  p.plan.shape.ahead = choose_ahead(r, p.plan.shape.routed[0].n_tiles, x.launch);
  p.move = {.tokens = {x.dy, x.x},
            .rows = {x.dy_rows, x.x_rows},
            .sources = 2,
            .choices = r.choices,
            .row_bytes = 2 * x.sizes.hidden,
            .slot_R = r.slot_R};
  p.combine = {.rows = x.dx_rows,
               .shared = x.sizes.shared_width > 0 ? x.shared_dx : nullptr,
               .row_TK = r.row_TK,
               .faulty = r.faulty,
               .out = x.dx,
               .d_prob_TK = x.d_prob_TK,
               .tokens = r.tokens,
               .choices = r.choices,
               .hidden = x.sizes.hidden};
  p.parts = x.parts;
  p.parts_per_row = x.sizes.width / kPartColumns;
  place_words(p, r, x.launch.words);
  if (x.peers.ranks > 1) {
    set_exchange(p, x.peers, x.launch, {x.peers.at.dy, x.peers.at.x}, x.dx_rows);
    launch_backward_of_ranks(p, x.launch, x.gradients.type, x.gradients.accumulate);
  } else {
    launch_backward<false>(p, x.launch, x.gradients.type, x.gradients.accumulate);
  }
}

}  // namespace mok::sm90
