package interop;

/** Counts payloads and adds up their hashes modulo 2^64, so that the order does not matter. */
final class Tally {
  private long rows;
  private long checksum;

  void add(byte[] payload) {
    rows++;
    checksum += Output.sum(payload);
  }

  long rows() {
    return rows;
  }

  String checksum() {
    return String.format("%016x", checksum);
  }
}
