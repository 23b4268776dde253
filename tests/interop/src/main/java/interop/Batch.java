package interop;

import co.cask.cdap.messaging.StoreRequest;
import co.cask.cdap.proto.id.TopicId;
import java.util.Iterator;
import java.util.List;

/** One publish or store request. */
final class Batch extends StoreRequest {
  private final List<byte[]> payloads;

  private Batch(TopicId topic, boolean transactional, long pointer, List<byte[]> payloads) {
    super(topic, transactional, pointer);
    this.payloads = payloads;
  }

  static Batch plain(TopicId topic, List<byte[]> payloads) {
    // CDAP's plain requests have -1.
    return new Batch(topic, false, -1L, payloads);
  }

  /** Returns a request in a transaction; without payloads, it references the payloads that the transaction stored. */
  static Batch transactional(TopicId topic, long pointer, List<byte[]> payloads) {
    return new Batch(topic, true, pointer, payloads);
  }

  @Override
  public boolean hasPayload() {
    return !payloads.isEmpty();
  }

  @Override
  public Iterator<byte[]> iterator() {
    return payloads.iterator();
  }
}
