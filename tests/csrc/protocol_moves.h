// The movers of a grid: rows in, then rows home, lap after lap.
#pragma once

#include "protocol_state.h"

namespace protocol {

class Moves : public State {
public:
  using State::State;

protected:
  bool mover(int r, Cta &a) {
    if (a.status != 1 || a.no_moves)
      return false;
    const Work &w = work(r);
    const bool takes = a.stage == kNothing && a.hands <= s.held &&
                       move_tickets(r) < static_cast<int>(w.moves.size());
    if (takes)
      a.hand[a.hands++] = move_tickets(r)++;
    if (takes && s.held > 0)
      return true;
    if (a.hands == 0)
      return a.under_way > 0 ? settle(r, a) : set(a.no_moves, 1);
    const Work::Move &move = w.moves[a.hand[0]];
    if (move.source == kHome || !may_begin(r, move.lap)) {
      if (takes)
        return true;
      if (a.under_way > 0 && s.seed != kUnsettled)
        return settle(r, a);
      return move.source == kHome && send_home(r, a, move);
    }
    if (a.under_way == s.depth)
      return takes || settle(r, a);
    read_tokens(r, move);
    write_rows(r, part(move), move.block);
    if (s.seed == kEarlyReady && move.source == 0)
      block(r, move.block).ready += move.rows.size();
    a.flight[a.under_way++] = a.hand[0];
    return shift(a.hand, a.hands);
  }

  // Nobody reads what the lap's rows are brought over.
  bool may_begin(int r, int lap) {
    if (s.seed == kNoLapWait || lap == 0)
      return true;
    const int before = s.seed == kOwnLapDone ? lap : lap - 1;
    return lap_done(r, before) >= lap_steps(work(r), before) &&
           (s.seed != kOwnLapDone || lap_done(r, lap) > 0);
  }

  static bool shift(Word (&queue)[kFlight], Word &count) {
    std::copy(queue + 1, queue + kFlight, queue);
    queue[kFlight - 1] = 0;
    return set(count, count - 1);
  }

  static Part part(const Work::Move &move) {
    return move.source == 0 ? kRows0 : kRows1;
  }

  void read_tokens(int r, const Work::Move &move) {
    for (const int i : move.rows)
      read(x(work(r).rows[i].rank, generation(r)), r,
           "a pull reads another call's tokens");
  }

  bool settle(int r, Cta &a) { // the oldest copies
    const Work::Move &move = work(r).moves[a.flight[0]];
    const Word rows = move.rows.size();
    read_tokens(r, move);
    read_rows(r, part(move), move.block, "rows are brought over others'");
    Block &b = block(r, move.block);
    (move.source == 0 ? b.brought : b.brought1) += rows;
    if (move.source == 0 || move.lap > 0)
      b.ready += s.seed == kEarlyReady && move.source == 0 ? 0 : rows;
    else if (mok::second_is_read(work(r).shape) || s.seed == kNoSecondRows)
      expert_rows(r, move.expert) += rows;
    else
      lap_done(r, 0) += rows;
    return shift(a.flight, a.under_way);
  }

  bool send_home(int r, Cta &a, const Work::Move &move) {
    const Work &w = work(r);
    Block &b = block(r, move.block);
    const bool sums = what(r).backward, early = s.seed == kEarlyArrival;
    if (move.rows.empty())
      return sent_home(r, a, move);
    if (a.stage == kNothing) {
      if (s.seed != kPushEarly && b.done1 < s.n1)
        return false;
      if (sums && s.seed != kNoSums && b.sums < s.n0)
        return false;
      if (b.made1 < s.n1)
        wrong("a push reads what pass 1 has not made", r);
      if (sums && b.sums < s.n0)
        wrong("a push reads sums that are not there", r);
      read_home(r, move);
      for (const int i : move.rows)
        home(w.rows[i].rank, w.rows[i].slot) = unseen(now(r));
      return set(a.stage, kIssued);
    }
    if (a.stage == (early ? kVisible : kIssued)) {
      read_home(r, move);
      for (const int i : move.rows)
        make_visible(home(w.rows[i].rank, w.rows[i].slot));
      return early ? sent_home(r, a, move) : set(a.stage, kVisible);
    }
    const Work::Row &row = w.rows[move.rows[a.row]];
    const bool last = a.row + 1u == move.rows.size();
    if (!last || s.seed != kDroppedArrival)
      arrived(row.rank, row.slot) = now(r);
    a.row = last ? 0 : a.row + 1;
    if (!last)
      return true;
    return early ? set(a.stage, kVisible) : sent_home(r, a, move);
  }

  void read_home(int r, const Work::Move &move) {
    read_rows(r, kMade1, move.block);
    if (what(r).backward)
      read_rows(r, kSums, move.block);
  }

  bool sent_home(int r, Cta &a, const Work::Move &move) {
    if (s.seed != kNoHomeRows)
      lap_done(r, move.lap) += move.groups;
    a.stage = kNothing;
    return shift(a.hand, a.hands);
  }
};

} // namespace protocol
