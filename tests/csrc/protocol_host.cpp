// Schedulers over protocol_machine.h: every order of steps of a small problem,
// and random and adversarial orders of drawn ones.
#include <chrono>
#include <cstdio>
#include <random>
#include <unordered_set>

#include "protocol_machine.h"

namespace {

using namespace protocol;

uint64_t hash_of(const std::vector<Word> &state) {
  uint64_t h = 0x9e3779b97f4a7c15ull ^ state.size();
  for (const Word word : state) {
    h ^= word;
    h *= 0xff51afd7ed558ccdull;
    h ^= h >> 32;
  }
  return h;
}

struct Found {
  int64_t states = 0, steps = 0;
  bool complete = true;
  std::string fault;
};

// Steps that commute with all others need no alternatives: they are taken
// first, whoever reads before whoever makes, so that a reader that does not
// wait is seen to read too early.
void run_quiet(Machine &m) {
  for (bool again = true; again && m.fault.empty();) {
    again = false;
    for (int agent = 0; agent < m.agents() && !again; ++agent)
      again = m.step(agent, true);
  }
}

Found explore(const Setup &setup, int64_t most) {
  Machine m(setup);
  Found found;
  std::unordered_set<uint64_t> seen;
  std::vector<std::vector<Word>> open;
  run_quiet(m);
  open.push_back(m.state);
  seen.insert(hash_of(m.canonical()));
  std::vector<Word> from;
  while (!open.empty()) {
    from.swap(open.back());
    open.pop_back();
    bool moved = false;
    for (int agent = 0; agent < m.agents(); ++agent) {
      m.state = from;
      if (!m.step(agent, false))
        continue;
      moved = true;
      ++found.steps;
      run_quiet(m);
      if (!m.fault.empty())
        break;
      if (seen.insert(hash_of(m.canonical())).second)
        open.push_back(m.state);
    }
    m.state = from;
    if (m.fault.empty() && !moved && !m.finished() && !m.expire())
      m.fault = m.where();
    if (!m.fault.empty())
      break;
    if (!moved && !m.finished()) { // a rank has expired
      if (seen.insert(hash_of(m.canonical())).second)
        open.push_back(m.state);
    }
    if (static_cast<int64_t>(seen.size()) > most) {
      found.complete = false;
      break;
    }
  }
  found.states = static_cast<int64_t>(seen.size());
  found.fault = m.fault;
  return found;
}

using Random = std::mt19937_64;
int below(Random &random, int end) { return static_cast<int>(random() % end); }

// Who may go: everybody; but one agent, after a few steps, or one rank's, only
// when nobody else can.
enum Manner { kFair, kStoppedAgent, kStarvedRank, kHastyRank, kManners };

// One order of steps, drawn.
Found wander(const Setup &setup, Random &random, int manner) {
  Machine m(setup);
  Found found;
  const int agents = m.agents(), each = m.agents_of_rank(),
            chosen = below(random, agents);
  int left = below(random, 12); // steps before the agent is held back
  const auto holds_back = [&](int agent) {
    switch (manner) {
    case kStoppedAgent:
      return agent == chosen && left == 0;
    case kStarvedRank:
      return agent / each == chosen / each;
    case kHastyRank:
      return agent / each != chosen / each;
    default:
      return false;
    }
  };
  const auto go = [&](int agent) {
    const bool goes = m.step(agent, false);
    left -= goes && agent == chosen && left > 0;
    return goes;
  };
  while (m.fault.empty() && !m.finished()) {
    bool moved = false;
    for (int tries = 0; tries < 16 && !moved; ++tries) {
      const int agent = m.draw(random);
      moved = !holds_back(agent) && go(agent);
    }
    const int first = below(random, agents);
    for (int held = 0; held < 2 && !moved; ++held) {
      for (int i = 0; i < agents && !moved; ++i) {
        const int agent = (first + i) % agents;
        moved = holds_back(agent) == (held != 0) && go(agent);
      }
    }
    ++found.steps;
    if (!moved && !m.expire())
      m.fault = m.where();
  }
  found.fault = m.fault;
  return found;
}

Call drawn_call(const Setup &s, Random &random) {
  Call call;
  call.backward = below(random, 2) != 0;
  const int experts = s.ranks * s.local, hot = below(random, experts),
            load = below(random, 4);
  for (int r = 0; r < s.ranks; ++r) {
    const int tokens = below(random, s.most + 1);
    std::vector<int> choice;
    for (int t = 0; t < tokens; ++t) {
      const int first = load == 1 ? hot : below(random, experts);
      for (int k = 0; k < s.choices; ++k) {
        const bool none = k >= experts || (load == 2 && below(random, 2) != 0);
        choice.push_back(none ? -1 : (first + k) % experts);
      }
    }
    call.tokens.push_back(tokens);
    call.choice.push_back(choice);
  }
  return call;
}

Setup drawn_setup(Random &random, int seed) {
  Setup s;
  s.ranks = 1 + below(random, 8);
  s.local = 1 + below(random, 3);
  s.choices = 1 + below(random, 3);
  s.most = 1 + below(random, 3);
  s.ctas = 1 + below(random, 3);
  s.slots = 1 + below(random, s.ctas);
  s.depth = 1 + below(random, kFlight);
  s.held = below(random, kFlight);
  s.n0 = 1 + below(random, 2);
  s.n1 = 1 + below(random, 2);
  s.ahead = 1 + below(random, 3);
  s.token_tile = 1 + below(random, 2);
  s.again = 1 + below(random, 2);
  s.movers = 1 + below(random, s.ctas);
  s.shared = below(random, 2) != 0;
  s.frozen = below(random, 4) == 0;
  s.keep_empty = below(random, 2) != 0;
  if (s.ranks > 1 && below(random, 4) != 0) {
    s.capacity = 1 + below(random, s.local);
    s.kept = below(random, s.capacity + 1);
  }
  s.seed = seed;
  constexpr uint32_t kEpochs[4] = {0, 1, 0xfffffffd, 0xfffffffe};
  s.epoch = kEpochs[below(random, 4)];
  const int calls = 1 + below(random, 4);
  for (int i = 0; i < calls; ++i) {
    s.calls.push_back(drawn_call(s, random));
    s.calls.back().layer = i;
  }
  std::vector<int> order(calls);
  for (int i = 0; i < calls; ++i)
    order[i] = i;
  s.order.assign(s.ranks, order);
  const int odd = below(random, s.ranks);
  switch (below(random, 8)) {
  case 0: // a rank stops
    s.dies = odd;
    s.may_expire = true;
    break;
  case 1: // a rank leaves one call out
    s.order[odd].erase(s.order[odd].begin() + below(random, calls));
    s.may_expire = true;
    break;
  case 2: { // a rank brings too many tokens
    Call &call = s.calls[below(random, calls)];
    call.tokens[odd] = s.most + 1;
    call.choice[odd].assign((s.most + 1) * s.choices, 0);
    break;
  }
  case 3: // a choice is faulty
    s.calls[below(random, calls)].spoiled = true;
    break;
  default:
    break;
  }
  return s;
}

// Two ranks of one expert each, two calls; `tokens` of rank 1, and so on.
Setup small_setup(const int32_t *words) {
  Setup s;
  int32_t frozen = 0;
  int32_t *const places[] = {
      &s.ranks, &s.local, &s.choices, &s.most, &s.ctas,     &s.slots, &s.depth,
      &s.held,  &s.n0,    &s.ahead,   &s.kept, &s.capacity, &frozen,  &s.seed};
  for (int32_t *const place : places)
    *place = *words++;
  s.n1 = s.n0;
  s.frozen = frozen != 0;
  const int calls = *words++, kind = *words++;
  s.dies = *words++;
  s.may_expire = s.dies >= 0;
  s.epoch = static_cast<uint32_t>(*words++);
  const int experts = s.ranks * s.local;
  std::vector<int> order;
  for (int i = 0; i < calls; ++i) {
    Call call;
    call.layer = i;
    call.backward = kind >> i & 1;
    for (int r = 0; r < s.ranks; ++r) {
      const int tokens = *words++;
      std::vector<int> choice;
      for (int t = 0; t < tokens; ++t)
        for (int k = 0; k < s.choices; ++k)
          choice.push_back((r + 1 + t + k) % experts);
      call.tokens.push_back(tokens);
      call.choice.push_back(choice);
    }
    s.calls.push_back(call);
    order.push_back(i);
  }
  s.order.assign(s.ranks, order);
  return s;
}

void say(const std::string &text, char *out, int room) {
  std::snprintf(out, room, "%s", text.c_str());
}

} // namespace

// Every order of a small problem. out: states, steps, whether all were visited.
extern "C" void explore_all(const int32_t *setup, int64_t most, int64_t *out,
                            char *fault, int room) {
  const Found found = explore(small_setup(setup), most);
  out[0] = found.states;
  out[1] = found.steps;
  out[2] = found.complete;
  say(found.fault, fault, room);
}

// Schedules first, first + 1, ... of `random`, each of a problem of its own,
// until one fails. Returns how many held; out: steps.
extern "C" int64_t wander_many(uint64_t random_seed, int64_t first,
                               int64_t schedules, int seed, int64_t *out,
                               char *fault, int room) {
  *out = 0;
  for (int64_t i = first; i < first + schedules; ++i) {
    Random random(random_seed * 0x9e3779b97f4a7c15ull +
                  static_cast<uint64_t>(i));
    const Setup setup = drawn_setup(random, seed);
    const Found found = wander(setup, random, static_cast<int>(i % kManners));
    *out += found.steps;
    if (!found.fault.empty()) {
      say(found.fault, fault, room);
      return i - first;
    }
  }
  return schedules;
}
