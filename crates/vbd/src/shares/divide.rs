//! How a rate is divided among those who want it.

/// Halvings of what lies between nothing and all: what is left is a rounding error.
const HALVINGS: u32 = 50;

/// What one wants.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) weight: f64,
    /// What it has before others have anything.
    pub(super) floor: f64,
    /// The most that it can use; infinite where it has less than it wants.
    pub(super) most: f64,
}

impl Wish {
    fn at(&self, level: f64) -> f64 {
        self.most.min(self.floor.max(self.weight * level))
    }
}

/// Divide so much: to each its floor, or the part that its weight gives it where that is more, and never more than it can use.
/// Nothing is left over that somebody could use. Where the floors are more than there is, each has the same part of its own.
pub(super) fn divide(all: f64, wishes: &[Wish]) -> Vec<f64> {
    let sum = |level: f64| wishes.iter().map(|wish| wish.at(level)).sum::<f64>();
    let floors = sum(0.0);
    if floors >= all {
        let part = if floors > 0.0 { all / floors } else { 0.0 };
        return wishes.iter().map(|wish| wish.at(0.0) * part).collect();
    }
    let lightest = wishes.iter().map(|wish| wish.weight).fold(f64::INFINITY, f64::min);
    let (mut low, mut high) = (0.0, all / lightest);
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        *if sum(middle) > all { &mut high } else { &mut low } = middle;
    }
    wishes.iter().map(|wish| wish.at(high)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, wanted: f64) -> bool {
        (found - wanted).abs() <= 1e-6 * wanted.abs().max(1.0)
    }

    /// Against what must hold of any division, on wishes that a seed chooses.
    #[test]
    fn floors_come_first_and_nothing_is_left_that_somebody_wants() {
        for seed in 0..20_000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let all = 1.0 + rng.f64() * 1e6;
            let mut some = |scale: f64| if rng.bool() { rng.f64() * scale } else { 0.0 };
            let wishes: Vec<Wish> = (0..1 + seed % 7)
                .map(|_| {
                    let most = match some(1.0) > 0.5 {
                        true => f64::INFINITY,
                        false => some(all),
                    };
                    Wish { weight: 1.0 + some(9999.0), floor: some(all / 3.0), most }
                })
                .collect();
            let parts = divide(all, &wishes);
            let sum: f64 = parts.iter().sum();
            let wanted: f64 = wishes.iter().map(|wish| wish.most).sum();
            let floors: f64 = wishes.iter().map(|wish| wish.most.min(wish.floor)).sum();
            assert!(sum <= all * (1.0 + 1e-6), "seed {seed}: {sum} of {all}");
            assert!(near(sum, all.min(wanted)), "seed {seed}: {sum} of {all}, {wanted} wanted");
            for (part, wish) in parts.iter().zip(&wishes) {
                assert!(*part <= wish.most, "seed {seed}");
                let floor = wish.most.min(wish.floor);
                assert!(floors > all || *part >= floor * (1.0 - 1e-6), "seed {seed}");
            }
            // Who has neither his floor alone nor all that he can use has by his weight what the others have by theirs.
            let levels = parts.iter().zip(&wishes).filter(|(part, wish)| {
                floors <= all && **part < wish.most && **part > wish.floor * (1.0 + 1e-6)
            });
            let levels: Vec<f64> = levels.map(|(part, wish)| part / wish.weight).collect();
            let between = |with: fn(f64, f64) -> f64| levels.iter().copied().reduce(with);
            if let (Some(low), Some(high)) = (between(f64::min), between(f64::max)) {
                assert!(near(low, high), "seed {seed}: {levels:?}");
                // And nobody who stands upon his floor could have had more by his weight.
                let on_floor = parts.iter().zip(&wishes).filter(|(part, wish)| **part < wish.most);
                for (part, wish) in on_floor {
                    assert!(*part >= wish.weight * high * (1.0 - 1e-6), "seed {seed}");
                }
            }
        }
    }

    #[test]
    fn weights_and_floors_give_what_they_say() {
        let wish = |weight, floor, most| Wish { weight, floor, most };
        let inf = f64::INFINITY;
        let of = |wishes: &[Wish]| divide(700.0, wishes).iter().map(|it| it.round()).collect();
        let plain: Vec<f64> = of(&[1.0, 2.0, 4.0].map(|weight| wish(weight, 0.0, inf)));
        assert_eq!(plain, [100.0, 200.0, 400.0]);
        let floor: Vec<f64> =
            of(&[wish(1.0, 300.0, inf), wish(1.0, 0.0, inf), wish(3.0, 0.0, inf)]);
        assert_eq!(floor, [300.0, 100.0, 300.0]);
        let idle: Vec<f64> = of(&[wish(5.0, 600.0, 100.0), wish(1.0, 0.0, inf)]);
        assert_eq!(idle, [100.0, 600.0]);
        let short: Vec<f64> = of(&[wish(1.0, 700.0, inf), wish(1.0, 700.0, inf)]);
        assert_eq!(short, [350.0, 350.0]);
        assert!(divide(700.0, &[]).is_empty());
    }
}
