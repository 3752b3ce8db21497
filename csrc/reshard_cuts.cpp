// Sets of interfaces whose load bounds every schedule.
#include "reshard.h"

#include <algorithm>
#include <iterator>
#include <map>

namespace fxpar::reshard {
namespace {

constexpr size_t kMostSets = 16;  // more sets of senders would hardly improve the bound, and slow down every step

std::vector<int64_t> find_times(const Problem& problem) {
  std::vector<int64_t> times(problem.kinds.size());
  for (const Class& flows : problem.classes) times[flows.kind] += flows.time * flows.count;
  return times;
}

// Sets of two senders and more: the bottleneck, then those that occur, the most loaded first, then their unions.
std::vector<std::vector<int>> find_sender_sets(const Problem& problem) {
  std::vector<Demand> demands = find_demands(problem);
  std::vector<std::vector<int>> sets;
  const auto add = [&sets](const std::vector<int>& set) {
    const bool is_new = std::find(sets.begin(), sets.end(), set) == sets.end();
    if (is_new && set.size() > 1 && sets.size() < kMostSets) sets.push_back(set);
  };
  add(find_bottleneck(find_fixed_loads(problem), demands).hosts);
  const auto is_heavier = [](const Demand& one, const Demand& other) { return one.amount > other.amount; };
  std::stable_sort(demands.begin(), demands.end(), is_heavier);
  for (const Demand& demand : demands) add(demand.senders);
  for (size_t i = 0; i < sets.size(); ++i) {
    for (size_t j = 0; j < i && sets.size() < kMostSets; ++j) {
      std::vector<int> both;
      std::set_union(sets[i].begin(), sets[i].end(), sets[j].begin(), sets[j].end(), std::back_inserter(both));
      add(both);
    }
  }
  return sets;
}

std::vector<Share> find_shares(const Problem& problem, const Kind& kind) {
  std::map<int, int> times, choices;
  for (int interface : kind.fixed)
    for (int cut : problem.cuts_of[interface]) ++times[cut];
  for (int sender : kind.senders)
    for (int cut : problem.cuts_of[sender]) ++choices[cut];
  for (const auto [cut, count] : choices)
    if (count == static_cast<int>(kind.senders.size())) ++times[cut];
  std::vector<Share> shares;
  for (const auto [cut, count] : times) shares.push_back({cut, count});
  return shares;
}

}  // namespace

std::vector<Demand> find_demands(const Problem& problem) {
  const std::vector<int64_t> times = find_times(problem);
  std::map<std::vector<int>, int64_t> amounts;
  for (size_t k = 0; k < times.size(); ++k) amounts[problem.kinds[k].senders] += times[k];
  std::vector<Demand> demands;
  for (const auto& [senders, amount] : amounts) demands.push_back({senders, amount});
  return demands;
}

std::vector<int64_t> find_fixed_loads(const Problem& problem) {
  const std::vector<int64_t> times = find_times(problem);
  std::vector<int64_t> loads(problem.num_interfaces);
  for (size_t k = 0; k < times.size(); ++k)
    for (int interface : problem.kinds[k].fixed) loads[interface] += times[k];
  return loads;
}

void find_cuts(Problem& problem) {
  for (int interface = 0; interface < problem.num_interfaces; ++interface) problem.cuts.push_back({interface});
  for (std::vector<int>& set : find_sender_sets(problem)) problem.cuts.push_back(std::move(set));
  problem.cuts_of.resize(problem.num_interfaces);
  for (size_t cut = 0; cut < problem.cuts.size(); ++cut)
    for (int interface : problem.cuts[cut]) problem.cuts_of[interface].push_back(cut);
  for (const Kind& kind : problem.kinds) problem.share_of.push_back(find_shares(problem, kind));
}

}  // namespace fxpar::reshard
