//! Which of several ways to store each of several things, for a budget of bytes.
//!
//! Everything starts at its smallest way. Of what is larger only the ways on the lower convex hull of bytes and error
//! count, so every next step of a thing saves less error per byte than the one before. All steps are taken in the
//! order of that ratio; one that does not fit any more ends its thing, and smaller steps of others go on. A large
//! thing may come too late that way: so the same is tried with every single way of every thing set beforehand, and the
//! least sum of errors is taken.
//!
//! What is known of it (a greedy rule of the multiple-choice knapsack; Sinha and Zoltners, 1979, prove the first for the
//! relaxed problem):
//! * the sum of errors exceeds the least possible by no more than the first step that did not fit would have saved,
//! * a larger budget never has a larger error: at the first step that only the larger one has room for, all that the
//!   smaller one does instead takes fewer bytes, at no better ratio; and what can be set beforehand, can be with more
//!   bytes, too.

/// One way to store something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Bytes it takes.
    pub bytes: u64,
    /// What is lost; of the same kind for everything, since it is added up. Finite and not below zero.
    pub error: f64,
}

/// A budget that not even the smallest ways fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at least {smallest} bytes are needed")]
pub struct TooSmall {
    /// Bytes of all smallest ways.
    pub smallest: u64,
}

/// A step of a thing along its hull.
struct Step {
    thing: usize,
    /// What the thing is before and after it.
    from: usize,
    to: usize,
    bytes: u64,
    /// Error saved per byte; within a thing it falls.
    ratio: f64,
}

/// Chooses a way for everything, given the ways of each: its number. Equal ratios go in the order of things, and of
/// equal sums the one with nothing set beforehand is taken, or the first.
///
/// # Errors
/// When the smallest ways take more than `budget`.
///
/// # Panics
/// When something has no way at all.
pub fn allocate(things: &[Vec<Cost>], budget: u64) -> Result<Vec<usize>, TooSmall> {
    let error = |chosen: &[usize]| chosen.iter().zip(things).map(|(way, ways)| ways[*way].error).sum::<f64>();
    let mut best = greedy(things, None, budget)?;
    let mut least = error(&best);
    for (thing, ways) in things.iter().enumerate() {
        for way in 0..ways.len() {
            let Ok(chosen) = greedy(things, Some((thing, way)), budget) else { continue };
            let error = error(&chosen);
            if error < least {
                (best, least) = (chosen, error);
            }
        }
    }
    Ok(best)
}

/// Takes steps by their ratio. Of a thing that is set beforehand there are none.
fn greedy(things: &[Vec<Cost>], set: Option<(usize, usize)>, budget: u64) -> Result<Vec<usize>, TooSmall> {
    let is_set = |thing: usize| set.filter(|(t, _)| *t == thing).map(|(_, way)| way);
    let first = |(thing, ways): (usize, &Vec<Cost>)| is_set(thing).unwrap_or_else(|| smallest(ways));
    let mut chosen: Vec<usize> = things.iter().enumerate().map(first).collect();
    let smallest = chosen.iter().zip(things).map(|(way, ways)| ways[*way].bytes).sum();
    let mut left = budget.checked_sub(smallest).ok_or(TooSmall { smallest })?;
    let free = things.iter().enumerate().filter(|(thing, _)| is_set(*thing).is_none());
    let mut steps: Vec<Step> = free.flat_map(|(thing, ways)| hull(thing, ways, chosen[thing])).collect();
    // Stable, and the steps of a thing are in order.
    steps.sort_by(|a, b| b.ratio.total_cmp(&a.ratio));
    for step in steps {
        // Where a step was left out, those after it have nothing to start from.
        if chosen[step.thing] == step.from && step.bytes <= left {
            left -= step.bytes;
            chosen[step.thing] = step.to;
        }
    }
    Ok(chosen)
}

/// The way of the fewest bytes, of equal ones that of the least error.
fn smallest(ways: &[Cost]) -> usize {
    let order = |a: &Cost, b: &Cost| a.bytes.cmp(&b.bytes).then(a.error.total_cmp(&b.error));
    let least = ways.iter().enumerate().min_by(|a, b| order(a.1, b.1));
    least.map(|(way, _)| way).expect("at least one way")
}

/// Steps from the smallest way on: always to the larger one that saves most error per byte.
fn hull(thing: usize, ways: &[Cost], smallest: usize) -> Vec<Step> {
    let (mut steps, mut from, mut steepest) = (Vec::new(), smallest, f64::INFINITY);
    loop {
        let better = |way: &Cost| way.bytes > ways[from].bytes && way.error < ways[from].error;
        let ratio = |way: &Cost| {
            #[expect(clippy::cast_precision_loss, reason = "a ratio")]
            let bytes = (way.bytes - ways[from].bytes) as f64;
            (ways[from].error - way.error) / bytes
        };
        // Of equal ratios the shorter step: the other one comes after it.
        let next = ways
            .iter()
            .enumerate()
            .filter(|(_, way)| better(way))
            .min_by(|a, b| ratio(b.1).total_cmp(&ratio(a.1)).then(a.1.bytes.cmp(&b.1.bytes)));
        let Some((to, way)) = next else { return steps };
        // On a straight stretch of the hull the last bit may say that it rises.
        steepest = ratio(way).min(steepest);
        steps.push(Step { thing, from, to, bytes: way.bytes - ways[from].bytes, ratio: steepest });
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ways(costs: &[(u64, f64)]) -> Vec<Cost> {
        costs.iter().map(|&(bytes, error)| Cost { bytes, error }).collect()
    }

    fn total(things: &[Vec<Cost>], chosen: &[usize]) -> (u64, f64) {
        let costs = || things.iter().zip(chosen).map(|(ways, way)| ways[*way]);
        (costs().map(|c| c.bytes).sum(), costs().map(|c| c.error).sum())
    }

    /// The least error that a budget allows, by trying everything.
    fn best(things: &[Vec<Cost>], budget: u64) -> Option<f64> {
        let Some((ways, rest)) = things.split_first() else { return Some(0.0) };
        let with = |way: &Cost| Some(way.error + best(rest, budget.checked_sub(way.bytes)?)?);
        ways.iter().filter_map(with).min_by(f64::total_cmp)
    }

    /// Savings per byte: a 3, then 1; b 2, then 0.5. From 20 bytes on.
    #[test]
    fn steps_are_taken_by_what_they_save_per_byte() {
        let a = ways(&[(10, 50.0), (20, 20.0), (30, 10.0)]);
        let b = ways(&[(10, 30.0), (20, 10.0), (30, 5.0)]);
        let things = [a, b];
        for (budget, chosen) in [
            (20, [0, 0]),
            (29, [0, 0]),
            (30, [1, 0]),
            (39, [1, 0]),
            (40, [1, 1]),
            (50, [2, 1]),
            (59, [2, 1]),
            (60, [2, 2]),
            (1000, [2, 2]),
        ] {
            assert_eq!(allocate(&things, budget), Ok(chosen.to_vec()), "{budget}");
        }
        assert_eq!(allocate(&things, 19), Err(TooSmall { smallest: 20 }));
    }

    #[test]
    fn what_is_above_the_hull_is_passed_over_and_ties_go_in_order() {
        // From 0 to 2 at once saves 45 for 20; by way of 1 it would be 5, then 40. Off the hull a way is taken where
        // it is set beforehand, and no better one has room.
        let a = ways(&[(10, 50.0), (20, 45.0), (30, 5.0)]);
        assert_eq!(allocate(std::slice::from_ref(&a), 19), Ok(vec![0]));
        assert_eq!(allocate(std::slice::from_ref(&a), 29), Ok(vec![1]));
        assert_eq!(greedy(std::slice::from_ref(&a), None, 29), Ok(vec![0]));
        assert_eq!(allocate(std::slice::from_ref(&a), 30), Ok(vec![2]));
        // More bytes for more error are never taken, and of equal bytes the lesser error is.
        let b = ways(&[(10, 50.0), (10, 40.0), (30, 60.0)]);
        assert_eq!(allocate(&[b], 99), Ok(vec![1]));
        let alike = ways(&[(1, 2.0), (3, 1.0)]);
        assert_eq!(allocate(&[alike.clone(), alike.clone(), alike], 7), Ok(vec![1, 1, 0]));
        // What does not fit leaves room for what does, though it saves less per byte.
        let (large, small) = (ways(&[(0, 100.0), (10, 0.0)]), ways(&[(0, 1.0), (2, 0.0)]));
        assert_eq!(allocate(&[large, small], 9), Ok(vec![0, 1]));
        assert_eq!(allocate(&[], 0), Ok(Vec::new()));
        // A large step of a slightly lesser ratio, for which the small ones before it leave no room: 10 for 10 bytes
        // against 1.1 for 1.
        let (large, small) = (ways(&[(0, 10.0), (10, 0.0)]), ways(&[(0, 1.1), (1, 0.0)]));
        assert_eq!(allocate(&[small.clone(), large, small], 10), Ok(vec![0, 1, 0]));
    }

    fn any_things() -> impl Strategy<Value = Vec<Vec<Cost>>> {
        // Small numbers, so that ties and straight hulls come up.
        let way = (0u64..12, 0u32..20).prop_map(|(bytes, error)| Cost { bytes, error: f64::from(error) });
        prop::collection::vec(prop::collection::vec(way, 1..5), 0..5)
    }

    proptest! {
        /// Within the bytes, and within one step of the best of all choices; never worse with more bytes.
        #[test]
        fn the_bounds_hold_for_every_budget(things in any_things()) {
            let smallest: u64 =
                things.iter().map(|ways| ways.iter().map(|w| w.bytes).min().unwrap()).sum();
            let mut before = f64::INFINITY;
            for budget in 0..60 {
                let chosen = match allocate(&things, budget) {
                    Err(too_small) => {
                        prop_assert!(budget < smallest);
                        prop_assert_eq!(too_small, TooSmall { smallest });
                        prop_assert_eq!(best(&things, budget), None);
                        continue;
                    }
                    Ok(chosen) => chosen,
                };
                let (bytes, error) = total(&things, &chosen);
                prop_assert!(bytes <= budget);
                prop_assert!(error <= before, "{} bytes: {} after {}", budget, error, before);
                before = error;
                // The largest step there is bounds the first that did not fit.
                let steps = |(thing, ways): (usize, &Vec<Cost>)| {
                    let saved = |s: &Step| ways[s.from].error - ways[s.to].error;
                    hull(thing, ways, super::smallest(ways)).iter().map(saved).fold(0.0, f64::max)
                };
                let step = things.iter().enumerate().map(steps).fold(0.0, f64::max);
                let best = best(&things, budget).unwrap();
                prop_assert!(error <= best + step + 1e-9, "{} bytes: {}, best {}, step {}", budget, error, best, step);
            }
            // With bytes enough there is nothing to choose.
            let free: f64 = things.iter().map(|w| w.iter().map(|w| w.error).fold(f64::INFINITY, f64::min)).sum();
            prop_assert_eq!(before, free);
        }
    }
}
