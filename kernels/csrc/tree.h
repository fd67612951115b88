// The parts of a step that one thread computes: the tree grows, is pruned and joined, a path is accepted and emitted,
// and what followed a text's last tokens before. tree.py, drafters/ngram.py and engine/step.py define them.
// Outputs are made here; inputs that are not contiguous are copied.
#pragma once

#include "tensors.h"

namespace eagle {

// The prices of drafts, if there are any. See tree.py: Prices.
using PriceList = std::tuple<double, Maybe, Maybe>;
struct Prices {
  const double level;
  const float *nodes, *trust;
  const int64_t count;  // of nodes

  Prices(const PriceList& list) : level(std::get<0>(list)), nodes(floats(std::get<1>(list))),
                                  trust(floats(std::get<2>(list))), count(nodes ? std::get<1>(list)->numel() : 0) {}
  explicit operator bool() const { return nodes; }

  // Of B texts together, that their nodes of these scores are accepted. score(b).
  template <class Score>
  double chance(int64_t B, const Score& score) const {
    double sum = 0;
    for (int64_t b = 0; b < B; b++) sum += std::min(1.0, double(trust[b]) * std::exp(double(score(b))));
    return sum;
  }

  // How many of the best nodes are worth their prices, at most `most`. score(b, i): of the i-th best of a text.
  template <class Score>
  int64_t worth(int64_t B, int64_t most, const Score& score) const {
    double gain = 0, highest = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < std::min(most, count); i++) {
      gain += chance(B, [&](int64_t b) { return score(b, i); }) - nodes[i];
      if (gain > highest) highest = gain, kept = i + 1;
    }
    return kept;
  }

  // How many of the newest nodes, whose scores are [B, count], are worth expanding, at most k; 0: no level is.
  int64_t rows(const Numbers& scores, int64_t k) const {
    const int64_t B = scores.size(0), count = scores.size(1);
    std::vector<float> ranked(&scores[0], &scores[B * count]);
    for (int64_t b = 0; b < B; b++) {
      const auto first = ranked.begin() + b * count;
      std::partial_sort(first, first + k, first + count, std::greater<>());
    }
    double all = 0;
    int64_t rows = 0;
    for (; rows < k; rows++) {
      const double each = chance(B, [&](int64_t b) { return ranked[b * count + rows]; });
      if (each < 2 * nodes[0]) break;
      all += each;
    }
    return all / 2 < level ? 0 : rows;
  }
};

// The k best children of a beam, whose scores and tokens are [B, R * width] and which saw [B, R, seen], become the next:
// scores, tokens, places among all candidates [B, k], what they see [B, k, seen + k], the row each came from [B, k].
// `size` candidates came before the children.
std::tuple<Numbers, Longs, Longs, Flags, Longs> advance(const Numbers& scores, const Longs& tokens, const Flags& sees,
                                                        int64_t size, int64_t k) {
  const int64_t B = sees.size(0), R = sees.size(1), seen = sees.size(2), count = scores.size(1), width = count / R;
  const Numbers best({B, k});
  const Longs token({B, k}), flat({B, k}), row({B, k});
  const Flags now({B, k, seen + k});
  std::vector<Best> order(count);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t i = 0; i < count; i++) order[i] = {scores[b * count + i], i};
    std::partial_sort(order.begin(), order.begin() + k, order.end());
    for (int64_t i = 0; i < k; i++) {
      const int64_t at = b * k + i, child = order[i].id;
      best[at] = order[i].value, token[at] = tokens[b * count + child], flat[at] = size + child, row[at] = child / width;
      bool* mine = &now[at * (seen + k)];
      std::memcpy(mine, &sees[(b * R + child / width) * seen], seen);
      std::memset(mine + seen, 0, k);
      mine[seen + i] = true;
    }
  }
  return {best, token, flat, now, row};
}

// Which of n slots each row sees [B, T, n]: the first `length` [B], and after them as local [B, T, M] says.
Flags see(const Longs& length, const Flags& local, int64_t n) {
  const int64_t B = local.size(0), T = local.size(1), M = local.size(2);
  const Flags out({B, T, n});
  for (int64_t row = 0; row < B * T; row++) {
    bool* sees = &out[row * n];
    const int64_t prefix = std::clamp<int64_t>(length[row / T], 0, n), more = std::min(M, n - prefix);
    std::memset(sees, 1, prefix);
    std::memcpy(sees + prefix, &local[row * M], more);
    std::memset(sees + prefix + more, 0, n - prefix - more);
  }
  return out;
}

using TreeFields = std::tuple<Longs, Longs, Longs, Flags, Numbers>;  // of tree.py: Tree
struct TreeOut {  // B trees of T nodes
  const int64_t T;
  const Longs tokens, parent, depth;
  const Flags ancestors;
  const Numbers scores;

  TreeOut(int64_t B, int64_t T)
      : T(T), tokens({B, T}), parent({B, T}), depth({B, T}), ancestors({B, T, T}), scores({B, T}) {}
  TreeFields fields() const { return {tokens, parent, depth, ancestors, scores}; }

  // Node i of text b, those before it written: 0 is the root.
  void put(int64_t b, int64_t i, int64_t token, int64_t above, float score) {
    const int64_t at = b * T + i;
    bool *mine = &ancestors[at * T], *over = &ancestors[(b * T + above) * T];
    tokens[at] = token, parent[at] = above, scores[at] = score;
    depth[at] = i ? depth[b * T + above] + 1 : 0;
    if (i) std::copy(over, over + T, mine);
    else std::fill(mine, mine + T, false);
    mine[i] = true;
  }
};

using Order = std::vector<int64_t>;  // places of a text's candidates
// For each of B texts the places of its best of `size` candidates, in ascending order: n, or as many as are worth their
// prices. score(b, place); of equals the first is better.
template <class Score>
std::vector<Order> best_places(int64_t B, int64_t size, int64_t n, const Prices& prices, const Score& score) {
  std::vector<Order> all(B, Order(size));
  for (int64_t b = 0; b < B; b++) {
    for (int64_t i = 0; i < size; i++) all[b][i] = i;
    std::partial_sort(all[b].begin(), all[b].begin() + n, all[b].end(), [&](int64_t i, int64_t j) {
      const uint32_t x = ordered(score(b, i) + 0.0f), y = ordered(score(b, j) + 0.0f);  // -0 as 0
      return x != y ? x > y : i < j;
    });
  }
  if (prices) n = prices.worth(B, n, [&](int64_t b, int64_t i) { return score(b, all[b][i]); });
  for (Order& order : all) order.resize(n), std::sort(order.begin(), order.end());
  return all;
}

// The tree of the T - 1 best of candidates below root [B], or of those worth their prices. scores, tokens, parents
// [B, count], of which there are `size`.
TreeFields pruned(const Numbers& scores, const Longs& tokens, const Longs& parents, const Longs& root, int64_t T,
                  int64_t size, const Prices& prices) {
  const int64_t B = scores.size(0), count = scores.size(1);
  const auto best = best_places(B, size, std::min(T - 1, size), prices,
                                [&](int64_t b, int64_t i) { return scores[b * count + i]; });
  TreeOut tree(B, best[0].size() + 1);
  for (int64_t b = 0; b < B; b++) {
    const Order& order = best[b];
    tree.put(b, 0, root[b], 0, 0);
    for (int64_t i = 1; i < tree.T; i++) {
      const int64_t from = b * count + order[i - 1], above = parents[from];
      const auto place = std::lower_bound(order.begin(), order.end(), above) - order.begin();
      tree.put(b, i, tokens[from], above < 0 ? 0 : place + 1, scores[from]);
    }
  }
  return tree.fields();
}
TreeFields prune(const Numbers& scores, const Longs& tokens, const Longs& parents, const Longs& root, int64_t T,
                 const PriceList& prices) {
  return pruned(scores, tokens, parents, root, T, scores.size(1), prices);
}

// The tree of the T most likely nodes of two with one root, or of those worth their prices. See tree.py: join.
TreeFields join(const Longs& token, const Longs& parent, const Numbers& score, const Longs& more, const Longs& above,
                const Numbers& others, int64_t T, const PriceList& prices) {
  struct Node {  // of two trees
    int64_t token, parent;  // parent: a place among all nodes, 0 the root
    float score;
  };
  const int64_t B = token.size(0), one = token.size(1), other = more.size(1), count = one + other - 1;
  std::vector<Node> nodes(B * count);
  std::vector<int64_t> place(other);    // where a node of the other stands among all
  std::vector<char> same(other * one);  // [other, one] whether their paths are equal
  for (int64_t b = 0; b < B; b++) {
    const int64_t first = b * one, second = b * other;
    Node* all = &nodes[b * count];
    for (int64_t i = 0; i < one; i++) all[i] = {token[first + i], parent[first + i], score[first + i]};
    std::fill(same.begin(), same.end(), 0);
    same[0] = 1, place[0] = 0;
    for (int64_t i = 1; i < other; i++) {
      const int64_t mine = more[second + i], over = above[second + i];
      place[i] = 0;
      for (int64_t j = 1; j < one; j++) {
        if (mine != token[first + j] || !same[over * one + parent[first + j]]) continue;
        same[i * one + j] = 1;
        all[j].score = std::max(all[j].score, others[second + i]);
        if (!place[i]) place[i] = j;
      }
      // What both have counts once.
      all[one + i - 1] = {mine, place[over], place[i] ? LEAST : others[second + i]};
      if (!place[i]) place[i] = one + i - 1;
    }
  }
  const auto best = best_places(B, count - 1, std::min(T, count) - 1, prices,
                                [&](int64_t b, int64_t i) { return nodes[b * count + i + 1].score; });
  TreeOut tree(B, best[0].size() + 1);
  for (int64_t b = 0; b < B; b++) {
    const Order& order = best[b];
    const auto kept = [&](int64_t node) {  // its place in the tree; the root's if it is not in it
      const auto at = std::lower_bound(order.begin(), order.end(), node - 1);
      return at == order.end() || *at != node - 1 ? 0 : at - order.begin() + 1;
    };
    tree.put(b, 0, token[b * one], 0, 0);
    for (int64_t i = 1; i < tree.T; i++) {
      const Node& node = nodes[b * count + order[i - 1] + 1];
      tree.put(b, i, node.token, kept(node.parent), node.score);
    }
  }
  return tree.fields();
}

// What followed the last tokens up to `length` [B] before, in the first n of text [B, N] -> tokens, likely [B, T].
// Of each drafted node [T - 1], its chain and how far after the match it stands; first, further [longest + 1]: how
// likely what follows a match of so many tokens is.
std::tuple<Longs, Numbers> follow(const Longs& texts, const Longs& length, int64_t n, const Longs& chain,
                                  const Longs& ahead, const Numbers& first, const Numbers& further, int64_t shortest) {
  struct Match {  // of a text's last tokens with those up to a slot
    int64_t tokens, at;  // how many; -1: there is none
  };
  const int64_t B = texts.size(0), T = chain.size(0) + 1, longest = first.size(0) - 1;
  const Longs tokens({B, T});
  const Numbers likely({B, T});
  std::vector<Match> matches, best(T > 1 ? *std::max_element(&chain[0], &chain[T - 1]) + 1 : 0);
  for (int64_t b = 0; b < B; b++) {
    const int64_t *text = &texts[b * texts.size(1)], end = length[b];
    const auto alike = [&](int64_t at) {  // how many tokens up to slot `at` equal the last ones
      int64_t same = 0;
      while (same < longest && same <= at && text[at - same] == text[end - same] && text[at - same] >= 0) same++;
      return same;
    };
    matches.clear();
    for (int64_t at = 0; at < std::min(end, n); at++)
      if (const int64_t same = alike(at); same >= shortest && text[at + 1] >= 0) matches.push_back({same, at});
    for (Match& chosen : best) {
      chosen = {0, -1};
      for (const Match& match : matches)  // the longest, of those the latest
        if (match.tokens >= chosen.tokens) chosen = match;
      // The next chain begins otherwise.
      std::erase_if(matches, [&](const Match& match) { return text[match.at + 1] == text[chosen.at + 1]; });
    }
    int64_t* token = &tokens[b * T];
    float* share = &likely[b * T];
    token[0] = text[end], share[0] = 0;
    for (int64_t i = 1; i < T; i++) {
      const Match match = best[chain[i - 1]];
      const int64_t after = ahead[i - 1];
      const int64_t next = match.at < 0 ? -1 : text[match.at + 1 + (after - 1) % (end - match.at)];
      token[i] = next < 0 ? text[end] : next;
      share[i] = next < 0 ? LEAST : (after == 1 ? first : further)[match.tokens];
    }
  }
  return {tokens, likely};
}

// The deepest path [B, W] on which chosen [B, T] agrees with the tree, its count [B], and what was chosen on it [B, W].
std::tuple<Longs, Longs, Longs> accept(const Longs& token, const Longs& parent, const Longs& depth, const Longs& chosen,
                                       int64_t W) {
  const int64_t B = token.size(0), T = token.size(1);
  const Longs path({B, W}), count({B}), taken({B, W});
  std::vector<char> accepted(T);
  for (int64_t b = 0; b < B; b++) {
    const int64_t at = b * T;
    int64_t last = 0;
    accepted[0] = true;
    for (int64_t i = 1; i < T; i++) {
      const int64_t above = parent[at + i];
      accepted[i] = accepted[above] && token[at + i] == chosen[at + above];
      if (accepted[i] && depth[at + i] > depth[at + last]) last = i;
    }
    count[b] = depth[at + last] + 1;
    std::fill(&path[b * W], &path[b * W] + W, 0);
    for (int64_t d = count[b] - 1; d > 0; d--, last = parent[at + last]) path[b * W + d] = last;
    for (int64_t i = 0; i < W; i++) taken[b * W + i] = chosen[at + path[b * W + i]];
  }
  return {path, count, taken};
}

// Append the first `count` [B] of tokens [B, W] to a state's buffers, cut at stop ids and the limit; how many were
// appended [B].
Longs emit(const Longs& tokens, const Longs& count, Tensor& text, Tensor& root, Tensor& length, Tensor& done, Tensor& out,
           const Longs& limit, const Longs& stops) {
  const int64_t B = tokens.size(0), W = tokens.size(1), room = text.size(1), window = out.size(1) - 3;
  const int64_t *first = stops.values, *end = first + stops.size(0);
  int64_t *texts = text.mutable_data_ptr<int64_t>(), *at = length.mutable_data_ptr<int64_t>();
  bool* over = done.mutable_data_ptr<bool>();
  const Longs appended({B});
  for (int64_t b = 0; b < B; b++) {
    const int64_t* token = &tokens[b * W];
    int64_t n = over[b] ? 0 : std::min(count[b], limit[b] - at[b]);
    bool stopped = false;
    for (int64_t i = 0; i < n && !stopped; i++)
      if (std::find(first, end, token[i]) != end) n = i + 1, stopped = true;
    if (n > 0) std::copy(token, token + n, texts + b * room + at[b] + 1);
    at[b] += n;
    root.mutable_data_ptr<int64_t>()[b] = texts[b * room + at[b]];
    over[b] |= stopped || at[b] >= limit[b];
    int64_t* to = out.mutable_data_ptr<int64_t>() + b * (window + 3);
    std::fill(std::copy(token, token + W, to), to + window, 0);
    to[window] = appended[b] = n;
    to[window + 1] = std::max<int64_t>(std::min(count[b] - 1, n), 0);
    to[window + 2] = over[b];
  }
  return appended;
}

// Rows path [B, W] of features [B, T], the first count [B] of them, become unread [B, R] where `moving` [B]; `more`:
// after those that are.
void hand_over(const Maybe& features, const Longs& path, const Longs& count, const Flags& moving, bool more,
               Tensor& unread, Tensor& unread_count) {
  const int64_t R = unread.size(1), W = path.size(1), size = unread.size(2) * int64_t(unread.element_size());
  const auto* from = static_cast<const char*>(data(features));
  auto* to = static_cast<char*>(unread.mutable_data_ptr());
  auto* known = unread_count.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < path.size(0); b++) {
    if (!moving[b]) continue;
    const int64_t first = more ? known[b] : 0, n = std::min(count[b], R - first);
    for (int64_t i = 0; from && i < n; i++)
      std::memcpy(to + (b * R + first + i) * size, from + (b * features->size(1) + path[b * W + i]) * size, size);
    known[b] = first + count[b];
  }
}

}  // namespace eagle
