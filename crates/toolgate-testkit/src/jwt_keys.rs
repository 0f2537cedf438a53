//! Key pairs on the curve P-256, for tests of signed tokens.

/// A private key in PEM, and the two coordinates of its public key.
pub const FIRST_KEY: (&str, &str, &str) = (
    "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgfcD7yzgZcjBRkRXg\n8TseOgs/5xTvk9SaS65fZ96w16WhRANCAARgeDbi1GK5+QwN3HJ5so81wO3MufUT\n901uBeqKbbcGEBxTGDAd9ug9R4wz/e1iL+ty2B9KsQsYLe+fpF3kscx/\n-----END PRIVATE KEY-----",
    "YHg24tRiufkMDdxyebKPNcDtzLn1E_dNbgXqim23BhA",
    "HFMYMB326D1HjDP97WIv63LYH0qxCxgt75-kXeSxzH8",
);
/// Another key pair.
pub const SECOND_KEY: (&str, &str, &str) = (
    "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgJfYMiZqr97KqoV6A\nYeVC+Yo20UHBcHay2+tyKMVBAKOhRANCAARRp1Y/yzNDPeSMiswWpHjcodOmVGtG\nRF4H55yTqESGCXhJkHnCU+Zp7A8F8H/qCJ2qk4kBGuxJqBqekOyV08tz\n-----END PRIVATE KEY-----",
    "UadWP8szQz3kjIrMFqR43KHTplRrRkReB-eck6hEhgk",
    "eEmQecJT5mnsDwXwf-oInaqTiQEa7EmoGp6Q7JXTy3M",
);
