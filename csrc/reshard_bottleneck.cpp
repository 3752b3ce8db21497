// The least time that hosts must send: an exact fractional load balance, by parametric maximum flow.
#include "reshard.h"

#include <algorithm>
#include <limits>

namespace fxpar::reshard {
namespace {

// Dinic's maximum flow. Node 0 is the source, node 1 the sink.
class Network {
 public:
  static constexpr int kSource = 0, kSink = 1;

  explicit Network(int nodes) : edges_of_(nodes), level_(nodes), next_(nodes) {}

  void add_edge(int from, int to, int64_t capacity) {
    edges_of_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
  }

  int64_t maximize_flow() {
    int64_t flow = 0;
    while (find_levels()) {
      std::fill(next_.begin(), next_.end(), 0);
      flow += push(kSource, std::numeric_limits<int64_t>::max());
    }
    return flow;
  }

  // Whether the node is on the source's side of the minimum cut, once the flow is maximal.
  bool is_before_cut(int node) const { return level_[node] >= 0; }

 private:
  struct Edge {
    int to;
    int64_t capacity;  // the residual capacity; the reverse edge is number `index ^ 1`
  };

  bool find_levels() {
    std::fill(level_.begin(), level_.end(), -1);
    level_[kSource] = 0;
    std::vector<int> queue{kSource};
    for (size_t head = 0; head < queue.size(); ++head) {
      for (int index : edges_of_[queue[head]]) {
        const Edge& edge = edges_[index];
        if (edge.capacity == 0 || level_[edge.to] >= 0) continue;
        level_[edge.to] = level_[queue[head]] + 1;
        queue.push_back(edge.to);
      }
    }
    return level_[kSink] >= 0;
  }

  int64_t push(int node, int64_t most) {
    if (node == kSink) return most;
    int64_t pushed = 0;
    for (size_t& i = next_[node]; i < edges_of_[node].size(); ++i) {
      const int index = edges_of_[node][i];
      const Edge& edge = edges_[index];
      if (edge.capacity == 0 || level_[edge.to] != level_[node] + 1) continue;
      const int64_t part = push(edge.to, std::min(most - pushed, edge.capacity));
      edges_[index].capacity -= part;
      edges_[index ^ 1].capacity += part;
      pushed += part;
      if (pushed == most) break;
    }
    return pushed;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<int>> edges_of_;
  std::vector<int> level_;
  std::vector<size_t> next_;
};

// Whether no set of hosts needs more time than `bottleneck`; otherwise sets `bottleneck` to one that does.
bool is_greatest(Bottleneck& bottleneck, const std::vector<int64_t>& fixed, const std::vector<Demand>& demands) {
  const int first_host = 2, first_demand = first_host + static_cast<int>(fixed.size());
  // All amounts are multiplied by the number of hosts, so that they stay integers.
  const int64_t scale = static_cast<int64_t>(bottleneck.hosts.size());
  Network network(first_demand + static_cast<int>(demands.size()));
  int64_t total = 0;
  for (size_t host = 0; host < fixed.size(); ++host)
    network.add_edge(first_host + host, Network::kSink, bottleneck.load - scale * fixed[host]);
  for (size_t i = 0; i < demands.size(); ++i) {
    const int64_t amount = scale * demands[i].amount;
    total += amount;
    network.add_edge(Network::kSource, first_demand + i, amount);
    for (int sender : demands[i].senders) network.add_edge(first_demand + i, first_host + sender, amount);
  }
  if (network.maximize_flow() == total) return true;

  bottleneck = {{}, 0};
  for (size_t host = 0; host < fixed.size(); ++host) {
    if (!network.is_before_cut(first_host + host)) continue;
    bottleneck.hosts.push_back(host);
    bottleneck.load += fixed[host];
  }
  for (size_t i = 0; i < demands.size(); ++i)
    if (network.is_before_cut(first_demand + i)) bottleneck.load += demands[i].amount;
  return false;
}

}  // namespace

Bottleneck find_bottleneck(const std::vector<int64_t>& fixed, const std::vector<Demand>& demands) {
  const int host = std::max_element(fixed.begin(), fixed.end()) - fixed.begin();
  Bottleneck bottleneck{{host}, fixed[host]};
  // Newton's method: the quotient of the hosts grows in each iteration, and from the second on their number shrinks.
  while (!is_greatest(bottleneck, fixed, demands)) continue;
  return bottleneck;
}

}  // namespace fxpar::reshard
