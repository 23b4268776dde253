package co.cask.cdap.data2.transaction.messaging.coprocessor.hbase20;

import java.util.Optional;
import org.apache.hadoop.hbase.coprocessor.RegionCoprocessor;
import org.apache.hadoop.hbase.coprocessor.RegionObserver;

/** Has the name of CDAP's observer, so that a test can add it to a table, and does nothing. */
public final class MessageTableRegionObserver implements RegionCoprocessor, RegionObserver {
  @Override
  public Optional<RegionObserver> getRegionObserver() {
    return Optional.of(this);
  }
}
