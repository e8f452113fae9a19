// Forward: moves x rows in | up, SwiGLU | down | combine, and the shared expert beside them.
#include "forward.cuh"

namespace mok::sm90 {
namespace {

using T = ForwardTiling;

struct Group {  // of experts: the routed ones, or the shared one
  const void *w1, *w2;
  const void* in;
  void *gate_up, *activation, *out;
  int64_t rows;
  int32_t width;
  bool shared;
};

void set_passes(DirectionParameters& p, const ForwardArguments& x, const Group& g) {
  const int hidden = x.sizes.hidden;
  PassShape* const shape = g.shared ? p.plan.shape.shared : p.plan.shape.routed;
  PassParameters* const pass = p.pass + (g.shared ? 2 : 0);

  PassParameters& up = pass[0];
  up.a = encode_operand(bf16(g.in, g.rows, hidden), {BLOCK_M, 1});
  up.out = encode_boxes(bf16(g.gate_up, g.rows, 2 * g.width), 2 * kColumns);
  up.second = encode_boxes(bf16(g.activation, g.rows, g.width), 2 * kColumns);
  set_table(up,
            g.w1,
            bf16(nullptr, 2 * g.width, hidden),
            operand_box<Role::kUp, T>(),
            x.routing,
            g.shared);
  up.columns = g.width;
  up.out_rows = static_cast<__nv_bfloat16*>(g.gate_up);
  up.second_rows = static_cast<__nv_bfloat16*>(g.activation);
  up.prob = g.shared ? nullptr : x.routing.prob_R;
  shape[0] = {
      .m_tiles = 0, .n_tiles = tiles_of(g.width, T::BLOCK_N / 2), .depth = hidden / BLOCK_K};

  PassParameters& down = pass[1];
  down.a = encode_operand(bf16(g.activation, g.rows, g.width), {BLOCK_M, 1});
  down.out = encode_boxes(bf16(g.out, g.rows, hidden), 2 * kDownColumns);
  set_table(down,
            g.w2,
            bf16(nullptr, hidden, g.width),
            operand_box<Role::kProduct, T>(),
            x.routing,
            g.shared);
  down.columns = hidden;
  down.out_rows = static_cast<__nv_bfloat16*>(g.out);
  shape[1] = {.m_tiles = 0, .n_tiles = tiles_of(hidden, T::BLOCK_N), .depth = g.width / BLOCK_K};
}

}  // namespace

void launch_forward(const ForwardArguments& x) {
  const Routing& r = x.routing;
  DirectionParameters p{};
  p.plan.shape = plan_shape(r, 2);
  p.fault = fault_record();
  set_passes(p,
             x,
             {.w1 = x.weights.w1,
              .w2 = x.weights.w2,
              .in = x.rows,
              .gate_up = x.gate_up,
              .activation = x.activation,
              .out = x.rows,  // up has read a block's x when down writes its y
              .rows = r.rows,
              .width = x.sizes.width,
              .shared = false});
  if (x.sizes.shared_width > 0 && r.tokens > 0) {
    set_passes(p,
               x,
               {.w1 = x.weights.shared_w1,
                .w2 = x.weights.shared_w2,
                .in = x.x,
                .gate_up = x.shared_gate_up,
                .activation = x.shared_activation,
                .out = x.shared_y,
                .rows = r.tokens,
                .width = x.sizes.shared_width,
                .shared = true});
  }
  p.plan.shape.ahead = choose_ahead(r, p.plan.shape.routed[0].n_tiles, x.launch);
  p.move = {.tokens = {x.x, nullptr},
            .rows = {x.rows, nullptr},
            .sources = 1,
            .choices = r.choices,
            .row_bytes = 2 * x.sizes.hidden,
            .slot_R = r.slot_R};
  p.combine = {.rows = x.rows,
               .shared = x.sizes.shared_width > 0 ? x.shared_y : nullptr,
               .row_TK = r.row_TK,
               .faulty = r.faulty,
               .out = x.y,
               .d_prob_TK = nullptr,
               .tokens = r.tokens,
               .choices = r.choices,
               .hidden = x.sizes.hidden};
  place_words(p, r, x.launch.words);
  if (x.peers.ranks > 1) {
    set_exchange(p, x.peers, x.launch, {x.peers.at.x, nullptr}, x.rows);
    launch_forward_of_ranks(p, x.launch);
  } else {
    launch_direction<Forward<false>>(p, x.launch);
  }
}

}  // namespace mok::sm90
