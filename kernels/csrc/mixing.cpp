// Drafts without a network: what followed a text's last tokens before, and two trees joined.
// drafters/lookup.py and tree.py define them.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"

namespace eagle {

namespace {

constexpr float LEAST = -std::numeric_limits<float>::infinity();

struct Match {  // of a text's last tokens with those up to a slot
  int64_t tokens, at;  // how many; -1: there is none
};

// How many tokens up to slot `at` equal those up to `end`, `most` at most.
int64_t alike(const int64_t* text, int64_t at, int64_t end, int64_t most) {
  int64_t n = 0;
  while (n < most && n <= at && text[at - n] == text[end - n]) n++;
  return n;
}

struct Node {  // of two trees
  int64_t token, parent;  // parent: a place among all nodes, 0 the root
  float score;
};

}  // namespace

void follow(const int64_t* texts, const int64_t* length, int64_t B, int64_t N, int64_t n, const Chains& chains,
            int64_t* tokens, float* likely) {
  std::vector<Match> matches, best(chains.T > 1 ? *std::max_element(chains.of, chains.of + chains.T - 1) + 1 : 0);
  for (int64_t b = 0; b < B; b++) {
    const int64_t *text = texts + b * N, end = length[b];
    matches.clear();
    for (int64_t at = 0; at < std::min(end, n); at++)
      if (const int64_t same = alike(text, at, end, chains.longest); same >= chains.shortest)
        matches.push_back({same, at});
    for (Match& chosen : best) {
      chosen = {0, -1};
      for (const Match& m : matches)  // the longest, of those the latest
        if (m.tokens >= chosen.tokens) chosen = m;
      // The next chain begins otherwise.
      std::erase_if(matches, [&](const Match& m) { return text[m.at + 1] == text[chosen.at + 1]; });
    }
    int64_t* token = tokens + b * chains.T;
    float* share = likely + b * chains.T;
    token[0] = text[end], share[0] = 0;
    for (int64_t i = 1; i < chains.T; i++) {
      const Match match = best[chains.of[i - 1]];
      const int64_t ahead = chains.ahead[i - 1];
      token[i] = match.at < 0 ? text[end] : text[match.at + 1 + (ahead - 1) % (end - match.at)];
      share[i] = match.at < 0 ? LEAST : (ahead == 1 ? chains.first : chains.further)[match.tokens];
    }
  }
}

void join(const Nodes& one, const Nodes& other, int64_t B, const TreeOut& tree) {
  const int64_t first = one.T, count = one.T + other.T - 1, T = tree.T;
  std::vector<Node> nodes(count);
  std::vector<int64_t> place(other.T), order(count - 1);  // place: where a node of the other stands among all
  std::vector<char> same(other.T * one.T);                // [other.T, one.T] whether their paths are equal
  for (int64_t b = 0; b < B; b++) {
    const int64_t *token = one.tokens + b * one.T, *parent = one.parent + b * one.T;
    const int64_t *more = other.tokens + b * other.T, *above = other.parent + b * other.T;
    const float *score = one.scores + b * one.T, *others = other.scores + b * other.T;
    for (int64_t i = 0; i < one.T; i++) nodes[i] = {token[i], parent[i], score[i]};
    std::fill(same.begin(), same.end(), 0);
    same[0] = 1, place[0] = 0;
    for (int64_t i = 1; i < other.T; i++) {
      place[i] = 0;
      for (int64_t j = 1; j < one.T; j++) {
        if (more[i] != token[j] || !same[above[i] * one.T + parent[j]]) continue;
        same[i * one.T + j] = 1;
        nodes[j].score = std::max(nodes[j].score, others[i]);
        if (!place[i]) place[i] = j;
      }
      // What both have counts once.
      nodes[first + i - 1] = {more[i], place[above[i]], place[i] ? LEAST : others[i]};
      if (!place[i]) place[i] = first + i - 1;
    }
    for (int64_t i = 0; i < count - 1; i++) order[i] = i + 1;
    std::partial_sort(order.begin(), order.begin() + T - 1, order.end(), [&](int64_t i, int64_t j) {
      const uint32_t x = ordered(nodes[i].score + 0.0f), y = ordered(nodes[j].score + 0.0f);  // -0 as 0
      return x != y ? x > y : i < j;
    });
    std::sort(order.begin(), order.begin() + T - 1);
    const auto kept = [&](int64_t node) {  // its place in the tree; the root's if it is not in it
      const auto at = std::lower_bound(order.begin(), order.begin() + T - 1, node);
      return at == order.begin() + T - 1 || *at != node ? 0 : at - order.begin() + 1;
    };
    tree.put(b, 0, token[0], 0, 0);
    for (int64_t i = 1; i < T; i++) {
      const Node& node = nodes[order[i - 1]];
      tree.put(b, i, node.token, kept(node.parent), node.score);
    }
  }
}

}  // namespace eagle
