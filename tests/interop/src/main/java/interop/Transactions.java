package interop;

import it.unimi.dsi.fastutil.longs.LongArrayList;
import java.util.ArrayList;
import java.util.List;
import java.util.NavigableMap;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import org.apache.tephra.TransactionManager.InProgressTx;
import org.apache.tephra.TransactionManager.InProgressType;
import org.apache.tephra.TxConstants;
import org.apache.tephra.persist.TransactionSnapshot;

/** Invented transactions of the past, and the snapshot that a transaction manager would have taken of them. */
final class Transactions {
  enum Outcome { COMMITTED, ROLLED_BACK, INVALID, IN_PROGRESS }

  private final long snapshotMs;
  private final TreeSet<Long> invalid = new TreeSet<>();
  private final NavigableMap<Long, InProgressTx> inProgress = new TreeMap<>();
  private long issued;

  Transactions(long snapshotMs) {
    this.snapshotMs = snapshotMs;
  }

  /** Returns an unused pointer of a millisecond: topics are written one after another, so times repeat. */
  long pointer(long atMs) {
    return atMs * TxConstants.MAX_TX_PER_MS + issued++ % TxConstants.MAX_TX_PER_MS;
  }

  /** Records the outcome of a transaction; the pointers after the first are its checkpoints. */
  void end(List<Long> pointers, Outcome outcome) {
    // The snapshot does not contain transactions that began later.
    List<Long> known = new ArrayList<>(pointers);
    known.removeIf(pointer -> pointer / TxConstants.MAX_TX_PER_MS >= snapshotMs);
    if (known.isEmpty()) {
      return;
    }
    if (outcome == Outcome.INVALID) {
      invalid.addAll(known);
    } else if (outcome == Outcome.IN_PROGRESS) {
      putInProgress(known);
    }
  }

  private void putInProgress(List<Long> pointers) {
    long id = pointers.get(0);
    long expires = snapshotMs + TimeUnit.DAYS.toMillis(1);
    List<Long> checkpoints = pointers.subList(1, pointers.size());
    inProgress.put(id, new InProgressTx(id - 1, expires, InProgressType.LONG, new LongArrayList(checkpoints)));
    for (long checkpoint : checkpoints) {
      inProgress.put(checkpoint, new InProgressTx(id - 1, expires, InProgressType.CHECKPOINT));
    }
  }

  TransactionSnapshot snapshot() {
    long last = snapshotMs * TxConstants.MAX_TX_PER_MS;
    return new TransactionSnapshot(snapshotMs, last, last, invalid, inProgress);
  }
}
