// Tree operations on one thread: grow, prune, join, n-gram lookup, accept, commit. The reference implementations are in
// tree.py, drafters/ngram.py and engine/step.py. Outputs are allocated here; non-contiguous inputs are copied.
#pragma once

#include "tensors.h"

namespace eagle {

// Marginal costs of drafting, see schedulers/costs.py: MarginalCosts. False: the tree is not limited.
using CostFields = std::tuple<double, Maybe, Maybe>;
struct MarginalCosts {
  const double level;
  const float *nodes, *confidence;
  const int64_t count;  // of `nodes`

  MarginalCosts(const CostFields& fields)
      : level(std::get<0>(fields)), nodes(floats(std::get<1>(fields))), confidence(floats(std::get<2>(fields))),
        count(nodes ? std::get<1>(fields)->numel() : 0) {}
  explicit operator bool() const { return nodes; }

  // The expected gain of one node of each of B sequences: the sum of their acceptance probabilities. score(b).
  template <class Score>
  double gain(int64_t B, const Score& score) const {
    double sum = 0;
    for (int64_t b = 0; b < B; b++) sum += std::min(1.0, double(confidence[b]) * std::exp(double(score(b))));
    return sum;
  }

  // The number of best nodes to keep, at most `limit`: those that maximize gain minus cost. score(b, i): the i-th best.
  template <class Score>
  int64_t keep(int64_t B, int64_t limit, const Score& score) const {
    double surplus = 0, max_surplus = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < std::min(limit, count); i++) {
      surplus += gain(B, [&](int64_t b) { return score(b, i); }) - nodes[i];
      if (surplus > max_surplus) max_surplus = surplus, kept = i + 1;
    }
    return kept;
  }

  // The number of newest nodes to expand, at most k; 0: grow no further level. scores [B, count] of the newest nodes.
  int64_t expand(const Numbers& scores, int64_t k) const {
    const int64_t B = scores.size(0), count = scores.size(1);
    std::vector<float> ranked(&scores[0], &scores[B * count]);
    for (int64_t b = 0; b < B; b++) {
      const auto first = ranked.begin() + b * count;
      std::partial_sort(first, first + k, first + count, std::greater<>());
    }
    double total = 0;
    int64_t expanded = 0;
    for (; expanded < k; expanded++) {
      const double next = gain(B, [&](int64_t b) { return ranked[b * count + expanded]; });
      if (next < 2 * nodes[0]) break;
      total += next;
    }
    return total / 2 < level ? 0 : expanded;
  }
};

// Make the k best children of a beam the next beam. scores, tokens [B, R * width] of the children; sees [B, R, seen]
// of the R parents; `size` candidates precede the children. Returns, for the next beam: scores, tokens and indices
// into all candidates [B, k], visible drafted tokens [B, k, seen + k], and the parent's row [B, k].
std::tuple<Numbers, Longs, Longs, Flags, Longs> advance(const Numbers& scores, const Longs& tokens, const Flags& sees,
                                                        int64_t size, int64_t k) {
  const int64_t B = sees.size(0), R = sees.size(1), seen = sees.size(2), count = scores.size(1), width = count / R;
  const Numbers best({B, k});
  const Longs token({B, k}), flat({B, k}), row({B, k});
  const Flags now({B, k, seen + k});
  std::vector<Candidate> order(count);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t i = 0; i < count; i++) order[i] = {scores[b * count + i], i};
    std::partial_sort(order.begin(), order.begin() + k, order.end());
    for (int64_t i = 0; i < k; i++) {
      const int64_t at = b * k + i, child = order[i].id;
      best[at] = order[i].value, token[at] = tokens[b * count + child];
      flat[at] = size + child, row[at] = child / width;
      bool* visible = &now[at * (seen + k)];
      std::memcpy(visible, &sees[(b * R + child / width) * seen], seen);
      std::memset(visible + seen, 0, k);
      visible[seen + i] = true;
    }
  }
  return {best, token, flat, now, row};
}

// The slots that each token attends to [B, T, n]: the first `length` [B], then those of the tree mask local [B, T, M].
Flags tree_attention_mask(const Longs& length, const Flags& local, int64_t n) {
  const int64_t B = local.size(0), T = local.size(1), M = local.size(2);
  const Flags out({B, T, n});
  for (int64_t row = 0; row < B * T; row++) {
    bool* visible = &out[row * n];
    const int64_t prefix = std::clamp<int64_t>(length[row / T], 0, n), tail = std::min(M, n - prefix);
    std::memset(visible, 1, prefix);
    std::memcpy(visible + prefix, &local[row * M], tail);
    std::memset(visible + prefix + tail, 0, n - prefix - tail);
  }
  return out;
}

using TreeFields = std::tuple<Longs, Longs, Longs, Flags, Numbers>;  // of tree.py: Tree
struct TreeBuilder {  // B trees of T nodes
  const int64_t T;
  const Longs tokens, parent, depth;
  const Flags ancestors;
  const Numbers scores;

  TreeBuilder(int64_t B, int64_t T)
      : T(T), tokens({B, T}), parent({B, T}), depth({B, T}), ancestors({B, T, T}), scores({B, T}) {}
  TreeFields fields() const { return {tokens, parent, depth, ancestors, scores}; }

  // Set node i of sequence b; its parent is set already. Node 0 is the root.
  void set(int64_t b, int64_t i, int64_t token, int64_t parent_node, float score) {
    const int64_t at = b * T + i;
    bool *own = &ancestors[at * T], *of_parent = &ancestors[(b * T + parent_node) * T];
    tokens[at] = token, parent[at] = parent_node, scores[at] = score;
    depth[at] = i ? depth[b * T + parent_node] + 1 : 0;
    if (i) std::copy(of_parent, of_parent + T, own);
    else std::fill(own, own + T, false);
    own[i] = true;
  }
};

using Order = std::vector<int64_t>;  // indices of candidates
// The indices of the best n of `size` candidates of each of B sequences, in ascending order; with costs, fewer may be
// kept. score(b, index); ties go to the lower index.
template <class Score>
std::vector<Order> best_nodes(int64_t B, int64_t size, int64_t n, const MarginalCosts& costs, const Score& score) {
  std::vector<Order> all(B, Order(size));
  for (int64_t b = 0; b < B; b++) {
    for (int64_t i = 0; i < size; i++) all[b][i] = i;
    std::partial_sort(all[b].begin(), all[b].begin() + n, all[b].end(), [&](int64_t i, int64_t j) {
      const uint32_t x = ordered_bits(score(b, i) + 0.0f), y = ordered_bits(score(b, j) + 0.0f);  // -0 as 0
      return x != y ? x > y : i < j;
    });
  }
  if (costs) n = costs.keep(B, n, [&](int64_t b, int64_t i) { return score(b, all[b][i]); });
  for (Order& order : all) order.resize(n), std::sort(order.begin(), order.end());
  return all;
}

// The index in the tree of a candidate; 0, the root, if it is not kept: an order of NaN scores may drop parents.
inline int64_t kept_index(const Order& order, int64_t candidate) {
  const auto at = std::lower_bound(order.begin(), order.end(), candidate);
  return at == order.end() || *at != candidate ? 0 : at - order.begin() + 1;
}

// Build the tree of the T - 1 best candidates below root [B]; with costs, fewer may be kept. scores, tokens, parents
// [B, count], the first `size` of them valid.
TreeFields pruned(const Numbers& scores, const Longs& tokens, const Longs& parents, const Longs& root, int64_t T,
                  int64_t size, const MarginalCosts& costs) {
  const int64_t B = scores.size(0), count = scores.size(1);
  const auto best = best_nodes(B, size, std::min(T - 1, size), costs,
                                [&](int64_t b, int64_t i) { return scores[b * count + i]; });
  TreeBuilder tree(B, best[0].size() + 1);
  for (int64_t b = 0; b < B; b++) {
    const Order& order = best[b];
    tree.set(b, 0, root[b], 0, 0);
    for (int64_t i = 1; i < tree.T; i++) {
      const int64_t from = b * count + order[i - 1];
      tree.set(b, i, tokens[from], kept_index(order, parents[from]), scores[from]);
    }
  }
  return tree.fields();
}
TreeFields prune(const Numbers& scores, const Longs& tokens, const Longs& parents, const Longs& root, int64_t T,
                 const CostFields& costs) {
  return pruned(scores, tokens, parents, root, T, scores.size(1), costs);
}

// Merge two trees with one root and keep the T best nodes; with costs, fewer may be kept. See drafters/mixed.py: join.
TreeFields join(const Longs& token, const Longs& parent, const Numbers& score, const Longs& token2, const Longs& parent2,
                const Numbers& score2, int64_t T, const CostFields& costs) {
  struct Node {
    int64_t token, parent;  // parent: an index into the nodes of both trees; 0: the root
    float score;
  };
  const int64_t B = token.size(0), one = token.size(1), other = token2.size(1), count = one + other - 1;
  std::vector<Node> nodes(B * count);
  std::vector<int64_t> index(other);    // of the second tree's nodes in `nodes`
  std::vector<char> same(other * one);  // [other, one] equal paths
  for (int64_t b = 0; b < B; b++) {
    const int64_t first = b * one, second = b * other;
    Node* all = &nodes[b * count];
    for (int64_t i = 0; i < one; i++) all[i] = {token[first + i], parent[first + i], score[first + i]};
    std::fill(same.begin(), same.end(), 0);
    same[0] = 1, index[0] = 0;
    for (int64_t i = 1; i < other; i++) {
      const int64_t id = token2[second + i], parent_node = parent2[second + i];
      index[i] = 0;
      for (int64_t j = 1; j < one; j++) {
        if (id != token[first + j] || !same[parent_node * one + parent[first + j]]) continue;
        same[i * one + j] = 1;
        all[j].score = std::max(all[j].score, score2[second + i]);
        if (!index[i]) index[i] = j;
      }
      // A node of both trees is kept once.
      all[one + i - 1] = {id, index[parent_node], index[i] ? NEG_INF : score2[second + i]};
      if (!index[i]) index[i] = one + i - 1;
    }
  }
  const auto best = best_nodes(B, count - 1, std::min(T, count) - 1, costs,
                                [&](int64_t b, int64_t i) { return nodes[b * count + i + 1].score; });
  TreeBuilder tree(B, best[0].size() + 1);
  for (int64_t b = 0; b < B; b++) {
    const Order& order = best[b];
    tree.set(b, 0, token[b * one], 0, 0);
    for (int64_t i = 1; i < tree.T; i++) {
      const Node& node = nodes[b * count + order[i - 1] + 1];
      tree.set(b, i, node.token, kept_index(order, node.parent - 1), node.score);
    }
  }
  return tree.fields();
}

// N-gram lookup: find earlier occurrences of the last tokens, up to `length` [B], in the first n of tokens [B, N],
// and draft what followed them -> tokens, scores [B, T]. chain, ahead [T - 1]: each node's chain and its distance
// from the match. first, further [longest + 1]: log-probabilities of the next token and of later ones, by length of
// the match.
std::tuple<Longs, Numbers> lookup(const Longs& texts, const Longs& length, int64_t n, const Longs& chain,
                                  const Longs& ahead, const Numbers& first, const Numbers& further, int64_t shortest) {
  struct Match {  // of the last tokens with `tokens` tokens up to slot `at`; -1: no match
    int64_t tokens, at;
  };
  const int64_t B = texts.size(0), T = chain.size(0) + 1, longest = first.size(0) - 1;
  const Longs tokens({B, T});
  const Numbers scores({B, T});
  std::vector<Match> matches, best(T > 1 ? *std::max_element(&chain[0], &chain[T - 1]) + 1 : 0);
  for (int64_t b = 0; b < B; b++) {
    const int64_t *text = &texts[b * texts.size(1)], end = length[b];
    const auto match_length = [&](int64_t at) {
      int64_t same = 0;
      while (same < longest && same <= at && text[at - same] == text[end - same] && text[at - same] >= 0) same++;
      return same;
    };
    matches.clear();
    for (int64_t at = 0; at < std::min(end, n); at++)
      if (const int64_t same = match_length(at); same >= shortest && text[at + 1] >= 0) matches.push_back({same, at});
    for (Match& chosen : best) {
      chosen = {0, -1};
      for (const Match& match : matches)  // the longest; ties go to the latest
        if (match.tokens >= chosen.tokens) chosen = match;
      // The next chain must start with another token.
      std::erase_if(matches, [&](const Match& match) { return text[match.at + 1] == text[chosen.at + 1]; });
    }
    int64_t* token = &tokens[b * T];
    float* score = &scores[b * T];
    token[0] = text[end], score[0] = 0;
    for (int64_t i = 1; i < T; i++) {
      const Match match = best[chain[i - 1]];
      const int64_t after = ahead[i - 1];
      const int64_t next = match.at < 0 ? -1 : text[match.at + 1 + (after - 1) % (end - match.at)];
      token[i] = next < 0 ? text[end] : next;
      score[i] = next < 0 ? NEG_INF : (after == 1 ? first : further)[match.tokens];
    }
  }
  return {tokens, scores};
}

// The deepest path [B, W] on which the target's tokens chosen [B, T] agree with the tree, its length [B], and the
// chosen tokens along it [B, W].
std::tuple<Longs, Longs, Longs> accept(const Longs& token, const Longs& parent, const Longs& depth, const Longs& chosen,
                                       int64_t W) {
  const int64_t B = token.size(0), T = token.size(1);
  const Longs path({B, W}), count({B}), tokens({B, W});
  std::vector<char> accepted(T);
  for (int64_t b = 0; b < B; b++) {
    const int64_t at = b * T;
    int64_t last = 0;
    accepted[0] = true;
    for (int64_t i = 1; i < T; i++) {
      const int64_t from = parent[at + i];
      accepted[i] = accepted[from] && token[at + i] == chosen[at + from];
      if (accepted[i] && depth[at + i] > depth[at + last]) last = i;
    }
    count[b] = depth[at + last] + 1;
    std::fill(&path[b * W], &path[b * W] + W, 0);
    for (int64_t d = count[b] - 1; d > 0; d--, last = parent[at + last]) path[b * W + d] = last;
    for (int64_t i = 0; i < W; i++) tokens[b * W + i] = chosen[at + path[b * W + i]];
  }
  return {path, count, tokens};
}

// Append the first `count` [B] of tokens [B, W] to the state's buffers, up to a stop id or the limit. Returns the
// number of appended tokens [B].
Longs emit(const Longs& tokens, const Longs& count, Tensor& text, Tensor& root, Tensor& length, Tensor& done, Tensor& out,
           const Longs& limit, const Longs& stops) {
  const int64_t B = tokens.size(0), W = tokens.size(1), S = text.size(1), max_commit = out.size(1) - 3;
  const int64_t *first = stops.values, *end = first + stops.size(0);
  int64_t *texts = text.mutable_data_ptr<int64_t>(), *at = length.mutable_data_ptr<int64_t>();
  bool* ended = done.mutable_data_ptr<bool>();
  const Longs appended({B});
  for (int64_t b = 0; b < B; b++) {
    const int64_t* token = &tokens[b * W];
    int64_t n = ended[b] ? 0 : std::min(count[b], limit[b] - at[b]);
    bool stopped = false;
    for (int64_t i = 0; i < n && !stopped; i++)
      if (std::find(first, end, token[i]) != end) n = i + 1, stopped = true;
    for (int64_t i = 0; i < n; i++) texts[b * S + at[b] + 1 + i] = std::max<int64_t>(token[i], 0);
    at[b] += n;
    root.mutable_data_ptr<int64_t>()[b] = texts[b * S + at[b]];
    ended[b] |= stopped || at[b] >= limit[b];
    int64_t* to = out.mutable_data_ptr<int64_t>() + b * (max_commit + 3);
    std::fill(std::copy(token, token + W, to), to + max_commit, 0);
    to[max_commit] = appended[b] = n;
    to[max_commit + 1] = std::max<int64_t>(std::min(count[b] - 1, n), 0);
    to[max_commit + 2] = ended[b];
  }
  return appended;
}

// Copy the features [B, T] of the first count [B] nodes of path [B, W] to unread [B, R], in sequences `moving` [B].
// `more`: append them instead of replacing the unread ones.
void append_features(const Maybe& features, const Longs& path, const Longs& count, const Flags& moving, bool more,
               Tensor& unread, Tensor& unread_count) {
  const int64_t R = unread.size(1), W = path.size(1), size = unread.size(2) * int64_t(unread.element_size());
  const auto* from = static_cast<const char*>(data(features));
  auto* to = static_cast<char*>(unread.mutable_data_ptr());
  auto* unread_counts = unread_count.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < path.size(0); b++) {
    if (!moving[b]) continue;
    const int64_t first = more ? unread_counts[b] : 0, n = std::min(count[b], R - first);
    for (int64_t i = 0; from && i < n; i++)
      std::memcpy(to + (b * R + first + i) * size, from + (b * features->size(1) + path[b * W + i]) * size, size);
    unread_counts[b] = first + count[b];
  }
}

}  // namespace eagle
