// The search for senders and starts: reading the flows, the two simple algorithms, and the choice of the algorithm.
#include "reshard.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

namespace fxpar::reshard {
namespace {

constexpr int64_t kMostBytesTimesHosts = int64_t{1} << 50;  // sums of loads, scaled, must fit in 64 bits

// If the bound is not reached, 64 flows take some 10 ms, 1,024 some 200 ms, and 16,384 one or two seconds.
constexpr int kFewestFlows = 64;
constexpr int64_t kGreedyStepsPerFlow = 4000, kMostGreedySteps = 20'000'000;
constexpr int64_t kDepthFirstStepsPerFlow = 5000;

struct Flow {
  Time num_bytes;
  std::vector<int> senders;
  std::vector<int> receivers;

  bool takes_time() const { return num_bytes > 0 && !receivers.empty(); }
};

// The flows as a problem, and the mapping back.
struct Reading {
  Problem problem;
  Time unit = 0;              // bytes per unit of the problem's time
  std::vector<int> class_of;  // by flow; -1 if it takes no time
};

bool is_valid(const Flow& flow, int num_hosts) {
  std::set<int> hosts(flow.senders.begin(), flow.senders.end());
  hosts.insert(flow.receivers.begin(), flow.receivers.end());
  const bool are_distinct = hosts.size() == flow.senders.size() + flow.receivers.size();
  const bool are_in_range = !hosts.empty() && *hosts.begin() >= 0 && *hosts.rbegin() < num_hosts;
  return flow.num_bytes >= 0 && !flow.senders.empty() && are_distinct && are_in_range;
}

std::vector<int> read_hosts(const int32_t* ends, const int32_t* hosts, int flow) {
  return {hosts + (flow == 0 ? 0 : ends[flow - 1]), hosts + ends[flow]};
}

std::optional<std::vector<Flow>> read_flows(const FxparFlows& given) {
  std::vector<Flow> flows;
  int64_t left = kMostBytesTimesHosts / std::max(given.num_hosts, 1);
  for (int i = 0; i < given.num_flows; ++i) {
    flows.push_back({given.num_bytes[i], read_hosts(given.sender_ends, given.senders, i),
                     read_hosts(given.receiver_ends, given.receivers, i)});
    Flow& flow = flows.back();
    if (!is_valid(flow, given.num_hosts) || flow.num_bytes > left) return std::nullopt;
    left -= flow.num_bytes;
    std::sort(flow.senders.begin(), flow.senders.end());
  }
  return flows;
}

Kind make_kind(const std::vector<int>& senders, const std::vector<int>& receivers, int num_hosts) {
  Kind kind{{}, senders};
  for (int host : receivers) kind.fixed.push_back(num_hosts + host);
  // All receivers but the last forward the flow.
  kind.fixed.insert(kind.fixed.end(), receivers.begin(), receivers.end() - 1);
  return kind;
}

Reading make_problem(const std::vector<Flow>& flows, int num_hosts) {
  using Members = std::vector<int>;
  std::map<std::pair<std::vector<int>, std::vector<int>>, std::map<Time, Members, std::greater<Time>>> kinds;
  Reading reading;
  for (size_t i = 0; i < flows.size(); ++i) {
    if (!flows[i].takes_time()) continue;
    kinds[{flows[i].senders, flows[i].receivers}][flows[i].num_bytes].push_back(i);
    reading.unit = std::gcd(reading.unit, flows[i].num_bytes);
    ++reading.problem.num_flows;
  }
  reading.class_of.assign(flows.size(), -1);
  Problem& problem = reading.problem;
  problem.num_interfaces = 2 * num_hosts;
  for (const auto& [hosts, members_by_bytes] : kinds) {
    for (const auto& [num_bytes, members] : members_by_bytes) {
      for (int flow : members) reading.class_of[flow] = static_cast<int>(problem.classes.size());
      problem.classes.push_back({static_cast<int>(problem.kinds.size()), num_bytes / reading.unit,
                                 static_cast<int>(members.size())});
    }
    problem.kinds.push_back(make_kind(hosts.first, hosts.second, num_hosts));
  }
  return reading;
}

// Every flow in turn, from its lowest sender.
Schedule schedule_naively(const Problem& problem, const std::vector<int>& order) {
  Timeline timeline(problem);
  for (int c : order) timeline.append(c, problem.kind_of(c).senders.front());
  return timeline.schedule();
}

// The longest flow first, from the sender that sends least so far.
Schedule schedule_by_load(const Problem& problem, std::vector<int> order) {
  std::stable_sort(order.begin(), order.end(), [&problem](int one, int other) {
    return problem.classes[one].time > problem.classes[other].time;
  });
  Timeline timeline(problem);
  std::vector<Time> sent(problem.num_interfaces);
  for (int c : order) {
    const std::vector<int>& senders = problem.kind_of(c).senders;
    const int sender = *std::min_element(senders.begin(), senders.end(),
                                         [&sent](int one, int other) { return sent[one] < sent[other]; });
    sent[sender] += problem.classes[c].time;
    timeline.append(c, sender);
  }
  return timeline.schedule();
}

Schedule find_schedule(const Reading& reading, int search, uint64_t seed) {
  const Problem& problem = reading.problem;
  std::vector<int> order;
  for (int c : reading.class_of)
    if (c >= 0) order.push_back(c);
  if (search == FXPAR_SEARCH_NAIVE) return schedule_naively(problem, order);
  Schedule best = schedule_by_load(problem, order);
  const Time bound = Timeline(problem).bound();
  const int64_t flows = std::max(problem.num_flows, kFewestFlows);
  const int64_t greedy_steps = std::min(flows * kGreedyStepsPerFlow, kMostGreedySteps);
  if (search == FXPAR_SEARCH_GREEDY || search == FXPAR_SEARCH_BEST)
    best = search_greedily(problem, std::move(best), bound, greedy_steps, seed);
  if (search == FXPAR_SEARCH_DEPTH_FIRST || search == FXPAR_SEARCH_BEST)
    best = search_depth_first(problem, std::move(best), bound, flows * kDepthFirstStepsPerFlow);
  return best;
}

// Assigns a schedule's placements to the flows of their classes, in order of start.
void write(Schedule schedule, const Reading& reading, int32_t* senders, int64_t* starts) {
  std::vector<std::vector<int>> waiting(reading.problem.classes.size());
  for (size_t flow = reading.class_of.size(); flow-- > 0;)
    if (reading.class_of[flow] >= 0) waiting[reading.class_of[flow]].push_back(flow);
  std::stable_sort(schedule.placements.begin(), schedule.placements.end(),
                   [](const Placement& one, const Placement& other) { return one.start < other.start; });
  for (const Placement& placement : schedule.placements) {
    std::vector<int>& flows = waiting[placement.class_index];
    senders[flows.back()] = placement.sender;
    starts[flows.back()] = placement.start * reading.unit;
    flows.pop_back();
  }
}

Bottleneck find_receiving_bottleneck(const Problem& problem) {
  const std::vector<int64_t> loads = find_fixed_loads(problem);
  const auto most = std::max_element(loads.begin() + problem.num_interfaces / 2, loads.end());
  return {{static_cast<int>(most - loads.begin())}, *most};
}

bool is_greater(const Bottleneck& one, const Bottleneck& other) {
  return static_cast<__int128>(one.load) * other.hosts.size() > static_cast<__int128>(other.load) * one.hosts.size();
}

}  // namespace
}  // namespace fxpar::reshard

using namespace fxpar::reshard;

int fxpar_reshard_search(const FxparFlows* flows, int search, uint64_t seed, int32_t* senders, int64_t* starts) {
  const auto read = read_flows(*flows);
  if (!read || search < FXPAR_SEARCH_NAIVE || search > FXPAR_SEARCH_BEST) return -1;
  for (size_t i = 0; i < read->size(); ++i) {
    senders[i] = (*read)[i].senders.front();
    starts[i] = 0;
  }
  Reading reading = make_problem(*read, flows->num_hosts);
  if (reading.problem.num_flows == 0) return 0;
  find_cuts(reading.problem);
  write(find_schedule(reading, search, seed), reading, senders, starts);
  return 0;
}

int fxpar_reshard_bound(const FxparFlows* flows, int64_t bound[2]) {
  const auto read = read_flows(*flows);
  if (!read) return -1;
  const Reading reading = make_problem(*read, flows->num_hosts);
  const Problem& problem = reading.problem;
  bound[0] = 0, bound[1] = 1;
  if (problem.num_flows == 0) return 0;
  // What receivers forward does not count: others could do that.
  Bottleneck most = find_bottleneck(std::vector<int64_t>(flows->num_hosts), find_demands(problem));
  const Bottleneck receiving = find_receiving_bottleneck(problem);
  if (is_greater(receiving, most)) most = receiving;
  bound[0] = most.load * reading.unit;
  bound[1] = most.hosts.size();
  return 0;
}
