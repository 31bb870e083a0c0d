//! The Diffie-Hellman groups of RFC 7919, with exponents as short as that allows.
//!
//! A prime of b bits is 2^b - 2^(b-64) + (⌊2^(b-130) e⌋ + X) 2^64 - 1, so it is computed from X rather than copied.
//! All of a group have the generator 2.

use std::sync::OnceLock;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd, Resize};

/// A group. Without one, a response can be guessed at offline by who listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DhGroup {
    /// No group: challenges are used as they are.
    Null,
    Ffdhe2048,
    Ffdhe3072,
    Ffdhe4096,
    Ffdhe6144,
    Ffdhe8192,
}

impl DhGroup {
    /// All, the one to be preferred first: the cheapest one that hides responses from listeners.
    pub(super) const ALL: [DhGroup; 6] = [
        DhGroup::Ffdhe2048,
        DhGroup::Ffdhe3072,
        DhGroup::Ffdhe4096,
        DhGroup::Ffdhe6144,
        DhGroup::Ffdhe8192,
        DhGroup::Null,
    ];

    /// The identifier in messages.
    pub(super) fn id(self) -> u8 {
        match self {
            DhGroup::Null => 0,
            DhGroup::Ffdhe2048 => 1,
            DhGroup::Ffdhe3072 => 2,
            DhGroup::Ffdhe4096 => 3,
            DhGroup::Ffdhe6144 => 4,
            DhGroup::Ffdhe8192 => 5,
        }
    }

    pub(super) fn from_id(id: u8) -> Option<DhGroup> {
        DhGroup::ALL.into_iter().find(|group| group.id() == id)
    }

    /// Bytes of a public value.
    pub(super) fn bytes(self) -> usize {
        self.parameters().map_or(0, |(bits, _, _)| bits as usize / 8)
    }

    /// Bits, X, and bits of an exponent (RFC 7919, appendix A).
    fn parameters(self) -> Option<(u32, u64, u32)> {
        match self {
            DhGroup::Null => None,
            DhGroup::Ffdhe2048 => Some((2048, 560_316, 225)),
            DhGroup::Ffdhe3072 => Some((3072, 2_625_351, 275)),
            DhGroup::Ffdhe4096 => Some((4096, 5_736_041, 325)),
            DhGroup::Ffdhe6144 => Some((6144, 15_705_020, 375)),
            DhGroup::Ffdhe8192 => Some((8192, 10_965_728, 400)),
        }
    }

    fn modulus(self) -> Option<&'static BoxedMontyParams> {
        static MODULI: [OnceLock<BoxedMontyParams>; 6] = [const { OnceLock::new() }; 6];
        let (bits, x, _) = self.parameters()?;
        Some(MODULI[usize::from(self.id())].get_or_init(|| {
            let prime = Option::from(Odd::new(prime(bits, x)));
            let Some(prime) = prime else { unreachable!("a prime of these is odd") };
            BoxedMontyParams::new_vartime(prime)
        }))
    }

    /// An own exponent made from random bytes: as long as it takes, and never zero.
    fn exponent(self, random: &[u8; 64]) -> Option<(BoxedUint, u32)> {
        let (_, _, bits) = self.parameters()?;
        let mut bytes = *random;
        let len = bits.div_ceil(8) as usize;
        bytes[0] |= 1;
        Some((BoxedUint::from_le_slice_truncated(&bytes[..len], bits), bits))
    }

    /// The public value of an exponent; empty without a group.
    pub(super) fn public(self, random: &[u8; 64]) -> Vec<u8> {
        let (Some(modulus), Some(exponent)) = (self.modulus(), self.exponent(random)) else { return Vec::new() };
        let two = BoxedUint::from(2_u64).resize(modulus.bits_precision());
        power(two, &exponent, modulus)
    }

    /// The secret shared with the owner of a public value. `None` if that is no value of the group, or there is none.
    pub(super) fn shared(self, random: &[u8; 64], public: &[u8]) -> Option<Vec<u8>> {
        let (modulus, exponent) = (self.modulus()?, self.exponent(random)?);
        if public.len() != self.bytes() {
            return None;
        }
        let public = BoxedUint::from_be_slice(public, modulus.bits_precision()).ok()?;
        // 0, 1 and p - 1 would make the secret known (RFC 7919, 5.1).
        let one = BoxedUint::from(1_u64).resize(modulus.bits_precision());
        let last = modulus.modulus().as_ref().wrapping_sub(&one);
        let is_valid = public > one && public < last;
        is_valid.then(|| power(public, &exponent, modulus))
    }
}

fn power(base: BoxedUint, (exponent, bits): &(BoxedUint, u32), modulus: &BoxedMontyParams) -> Vec<u8> {
    BoxedMontyForm::new(base, modulus).pow_bounded_exp(exponent, *bits).retrieve().to_be_bytes().into_vec()
}

/// The prime with so many bits and this X.
fn prime(bits: u32, x: u64) -> BoxedUint {
    let number = |value: u64| BoxedUint::from(value).resize(bits);
    let e = euler(bits - 130).resize(bits);
    let middle = e.wrapping_add(number(x)).shl(64);
    // 2^b - 2^(b-64) is the top word of ones.
    let top = number(u64::MAX).shl(bits - 64);
    top.wrapping_add(&middle).wrapping_sub(number(1))
}

/// ⌊2^bits e⌋, as the sum of 2^bits / n!.
fn euler(bits: u32) -> BoxedUint {
    // The terms are each too small by less than one; there are fewer than a thousand.
    const GUARD_BITS: u32 = 64;
    let limbs = ((bits + GUARD_BITS) / 32 + 1) as usize;
    // From the high end.
    let mut term = vec![0_u32; limbs];
    let at = (bits + GUARD_BITS) / 32;
    term[limbs - 1 - at as usize] = 1 << ((bits + GUARD_BITS) % 32);
    let mut sum = term.clone();
    for number in 1.. {
        let mut rest = 0;
        for limb in &mut term {
            let value = rest << 32 | u64::from(*limb);
            (*limb, rest) = ((value / number) as u32, value % number);
        }
        if term.iter().all(|limb| *limb == 0) {
            break;
        }
        let mut carry = 0;
        for (limb, add) in sum.iter_mut().zip(&term).rev() {
            let value = u64::from(*limb) + u64::from(*add) + carry;
            (*limb, carry) = (value as u32, value >> 32);
        }
    }
    let bytes: Vec<u8> = sum.iter().flat_map(|limb| limb.to_be_bytes()).collect();
    let bits = limbs as u32 * 32;
    BoxedUint::from_be_slice_truncated(&bytes, bits).shr(GUARD_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First and last words of the primes in RFC 7919, appendix A.
    #[test]
    fn the_primes_are_those_of_the_rfc() {
        for (group, last) in [
            (DhGroup::Ffdhe2048, "886B423861285C97FFFFFFFFFFFFFFFF"),
            (DhGroup::Ffdhe3072, "25E41D2B66C62E37FFFFFFFFFFFFFFFF"),
            (DhGroup::Ffdhe4096, "C68A007E5E655F6AFFFFFFFFFFFFFFFF"),
            (DhGroup::Ffdhe6144, "A40E329CD0E40E65FFFFFFFFFFFFFFFF"),
            (DhGroup::Ffdhe8192, "D68C8BB7C5C6424CFFFFFFFFFFFFFFFF"),
        ] {
            let hex = format!("{:X}", group.modulus().unwrap().modulus().as_ref());
            assert_eq!(hex.len(), 2 * group.bytes());
            // e = 2.ADF85458A2BB4A9A in hexadecimal.
            assert!(hex.starts_with("FFFFFFFFFFFFFFFFADF85458A2BB4A9A"), "{group:?}: {hex}");
            assert!(hex.ends_with(last), "{group:?}: {hex}");
        }
    }

    #[test]
    fn both_sides_of_a_group_have_the_same_secret() {
        for group in DhGroup::ALL.into_iter().filter(|group| *group != DhGroup::Null) {
            let (one, other) = ([3; 64], [0xfe; 64]);
            let shared = group.shared(&one, &group.public(&other)).unwrap();
            assert_eq!(group.shared(&other, &group.public(&one)), Some(shared.clone()));
            assert_eq!(shared.len(), group.bytes());
            assert!(shared.iter().any(|byte| *byte != 0));
        }
        assert_eq!((DhGroup::Null.public(&[1; 64]), DhGroup::Null.shared(&[1; 64], &[])), (Vec::new(), None));
    }

    #[test]
    fn public_values_that_would_give_the_secret_away_are_refused() {
        let group = DhGroup::Ffdhe2048;
        let prime = group.modulus().unwrap().modulus().as_ref().to_be_bytes().into_vec();
        let value = |last: u8| [vec![0; 255], vec![last]].concat();
        let mut before = prime.clone();
        before[255] -= 1;
        for bad in [value(0), value(1), before, prime, vec![0xff; 256], Vec::new(), vec![2; 255], vec![2; 257]] {
            assert_eq!(group.shared(&[5; 64], &bad), None, "{bad:?}");
        }
        assert!(group.shared(&[5; 64], &value(2)).is_some());
    }
}
