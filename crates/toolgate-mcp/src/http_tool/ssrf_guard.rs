//! Guards HTTP tools against SSRF: private and local addresses are forbidden by default.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// The error for a host name that resolves to a forbidden address.
#[derive(Debug)]
pub(crate) struct ForbiddenAddressError(String);

impl std::fmt::Display for ForbiddenAddressError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` resolves to a private or local address", self.0)
    }
}

impl std::error::Error for ForbiddenAddressError {}

/// A DNS resolver that rejects forbidden addresses. The checked addresses are the ones that are
/// connected to, which prevents DNS rebinding.
pub(crate) struct AddressFilterResolver(pub(crate) Arc<[IpNet]>);

impl Resolve for AddressFilterResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let networks = Arc::clone(&self.0);
        Box::pin(async move {
            let host = name.as_str().to_owned();
            let found: Vec<SocketAddr> =
                tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
            // One forbidden address rejects the name: a mixed result looks like an attack.
            if found.iter().any(|address| is_forbidden(address.ip(), &networks)) {
                return Err(Box::new(ForbiddenAddressError(host))
                    as Box<dyn std::error::Error + Send + Sync>);
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

/// Returns whether an address is private, local or reserved, and not allowed.
pub(crate) fn is_forbidden(address: IpAddr, allowed: &[IpNet]) -> bool {
    let address = extract_ipv4(address);
    !allowed.iter().any(|network| network.contains(&address)) && !is_public(address)
}

/// Extracts an IPv4 address that is embedded in an IPv6 address.
fn extract_ipv4(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let [a, b, c, d, e, f, g, h] = v6.segments();
    let embedded = |high: u16, low: u16| {
        let ([one, two], [three, four]) = (high.to_be_bytes(), low.to_be_bytes());
        IpAddr::V4(Ipv4Addr::new(one, two, three, four))
    };
    match (a, b, c, d, e, f) {
        (0, 0, 0, 0, 0, 0xffff) | (0x64, 0xff9b, 0, 0, 0, 0) => embedded(g, h),
        // `::1` and `::` embed no address.
        (0, 0, 0, 0, 0, 0) if g != 0 => embedded(g, h),
        (0x2002, high, low, ..) => embedded(high, low),
        _ => address,
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            let reserved = matches!(
                (a, b, c),
                (0 | 10 | 127 | 224..=255, _, _)
                    | (100, 64..=127, _)
                    | (169, 254, _)
                    | (172, 16..=31, _)
                    | (192, 0, 0 | 2)
                    | (192, 88, 99)
                    | (192, 168, _)
                    | (198, 18 | 19, _)
                    | (198, 51, 100)
                    | (203, 0, 113)
            );
            !reserved
        }
        IpAddr::V6(v6) => {
            let [a, b, ..] = v6.segments();
            // Global unicast, without documentation and tunnel ranges.
            (0x2000..=0x3fff).contains(&a)
                && !(a == 0x2001 && (b == 0xdb8 || b < 0x200))
                && v6 != Ipv6Addr::LOCALHOST
        }
    }
}

/// Percent-encodes a value for a URL, except letters, digits and `-._~`.
pub(crate) fn percent_encoded(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    text.bytes()
        .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_forbidden_in_every_form() {
        let forbidden = [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "192.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2002:a00:1::",
            "2001:db8::1",
            "2001::1",
            "fec0::1",
        ];
        for address in forbidden {
            assert!(is_forbidden(address.parse().unwrap(), &[]), "{address}");
        }
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.216.34",
            "2606:4700::1111",
            "172.32.0.1",
            "100.128.0.1",
            "2002:808:808::",
        ] {
            assert!(!is_forbidden(address.parse().unwrap(), &[]), "{address}");
        }
        let allowed: Vec<IpNet> = vec!["10.0.0.0/8".parse().unwrap()];
        assert!(
            !is_forbidden("10.1.2.3".parse().unwrap(), &allowed)
                && is_forbidden("192.168.0.1".parse().unwrap(), &allowed)
        );
        assert!(!is_forbidden("::ffff:10.1.2.3".parse().unwrap(), &allowed));
    }

    #[test]
    fn values_are_percent_encoded() {
        assert_eq!(percent_encoded("a/b?c#d e%"), "a%2Fb%3Fc%23d%20e%25");
        assert_eq!(percent_encoded("Ä-._~"), "%C3%84-._~");
    }
}
